"""Tasks: a model, examples, a loss, a fixed evaluation and a target. `load` makes one of spec text.

Spec text is a name with options, such as "mlp", "cnn(skew=0.9)" or, for your own, "path.py:function": a function that
takes the data path (or None) first, keyword options after it, and returns a `Task`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab import datasets, models
from thinwire.lab.datasets import Dataset


@dataclass(frozen=True)
class Metric:
    """What a task is judged by: one value per example, of which the mean counts."""

    name: str
    values: Callable[[Tensor, Tensor], Tensor]  # of outputs and targets
    rising: bool  # more is better

    def reached(self, value: float, target: float) -> bool:
        return value >= target if self.rising else value <= target


@dataclass(frozen=True)
class Task:
    """What is learnt and how it is judged. It does not know about workers' links, schemes or exchanges."""

    name: str
    dataset: Dataset
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]  # of outputs and targets
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    metric: Metric
    target: float
    steps: int
    batch: int = 32  # examples per worker and step
    evaluate_every: int = 5  # steps
    skew: float = 0.0  # higher => the workers' shards differ more; 0: alike, 1: each its own labels

    def __post_init__(self) -> None:
        if not 0 <= self.skew <= 1:
            raise ValueError(f"skew must be within 0..1, got {self.skew}")
        for name in ("steps", "batch", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


accuracy = Metric("accuracy", lambda outputs, labels: (outputs.argmax(-1) == labels).float(), rising=True)
bits_per_byte = Metric(
    "bits per byte",
    lambda logits, text: (
        functional.cross_entropy(logits.mT, text.long(), reduction="none").mean(1) / 0.6931472
    ),
    rising=False,
)
squared_error = Metric("squared error", lambda outputs, y: (outputs - y).square().sum(-1), rising=False)


def sgd(lr: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def adam(lr: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, lr=lr)


def mlp(
    data: Path | None,
    *,
    width: int = 2048,
    target: float = 0.8,
    steps: int = 60,
    batch: int = 64,
    skew: float = 0.0,
) -> Task:
    """The embedded images and a multi-layer perceptron of 5.8 M weights: little to compute, much to send."""
    return Task(
        "mlp", datasets.embedded_images(), lambda: models.mlp(width), functional.cross_entropy, sgd(0.05), accuracy,
        target, steps, batch, skew=skew,
    )  # fmt: skip


def cnn(
    data: Path | None, *, target: float = 0.8, steps: int = 120, batch: int = 32, skew: float = 0.0
) -> Task:
    """The embedded images and a convolutional network of 0.6 M weights: more to compute than to send."""
    return Task(
        "cnn", datasets.embedded_images(), models.cnn, functional.cross_entropy, sgd(0.05), accuracy,
        target, steps, batch, evaluate_every=10, skew=skew,
    )  # fmt: skip


def fashion(
    data: Path | None, *, target: float = 0.85, steps: int = 400, batch: int = 32, skew: float = 0.0
) -> Task:
    """All of Fashion-MNIST, from its idx files in --data, and the convolutional network."""
    dataset = datasets.fashion_mnist(_needed(data, "fashion", "the four Fashion-MNIST idx .gz files"))
    return Task(
        "fashion", dataset, models.cnn, functional.cross_entropy, sgd(0.05), accuracy,
        target, steps, batch, evaluate_every=20, skew=skew,
    )  # fmt: skip


def cifar10(
    data: Path | None, *, target: float = 0.5, steps: int = 600, batch: int = 32, skew: float = 0.0
) -> Task:
    """CIFAR-10, from the binary version's files in --data, and a convolutional network of 0.8 M weights."""
    dataset = datasets.cifar10(_needed(data, "cifar10", "the CIFAR-10 .bin files"))
    return Task(
        "cifar10", dataset, lambda: models.cnn(channels=3, size=32), functional.cross_entropy, sgd(0.03), accuracy,
        target, steps, batch, evaluate_every=40, skew=skew,
    )  # fmt: skip


def text(
    data: Path | None, *, width: int = 128, target: float = 3.45, steps: int = 200, batch: int = 16
) -> Task:
    """A transformer of 0.5 M weights learns to predict the next byte of the text file in --data."""
    dataset = datasets.text_bytes(_needed(data, "text", "a text file"), context=64)
    return Task(
        "text", dataset, lambda: models.ByteTransformer(width=width, layers=2, heads=4, context=64),
        lambda logits, text: functional.cross_entropy(logits.flatten(0, 1), text.flatten().long()),
        adam(2e-3), bits_per_byte, target, steps, batch, evaluate_every=20,
    )  # fmt: skip


def regression(data: Path | None, *, target: float = 0.02, steps: int = 150, batch: int = 64) -> Task:
    """Linear regression, 512 features to 64 outputs: convex, so that what a scheme loses shows undisguised."""
    return Task(
        "regression", datasets.regression(features=512, outputs=64, noise=0.1), lambda: nn.Linear(512, 64),
        lambda outputs, y: (outputs - y).square().sum(-1).mean(), sgd(0.01), squared_error, target, steps, batch,
    )  # fmt: skip


TASKS: dict[str, Callable[..., Task]] = {
    task.__name__: task for task in (mlp, cnn, fashion, cifar10, text, regression)
}


def load(spec: str, data: Path | None = None) -> Task:
    """The task that `spec` describes. Nothing of the spec is evaluated: options are literals."""
    path, _, call_text = spec.strip().rpartition(".py:")
    try:
        call = ast.parse(call_text, mode="eval").body
    except SyntaxError:
        call = None
    if isinstance(call, ast.Name):
        call = ast.Call(call, [], [])
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(
            f"cannot read the task {spec!r}; it looks like 'mlp', 'cnn(skew=0.9)' or 'path.py:function'"
        )

    name = call.func.id
    known = _functions_of(Path(path + ".py")) if path else TASKS
    if name not in known:
        raise ValueError(
            f"unknown task {name!r}; known: {', '.join(known)}" + ("" if path else " and path.py:function")
        )
    accepted = [
        p.name for p in inspect.signature(known[name]).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    options = {}
    for keyword in call.keywords:
        if keyword.arg not in accepted:
            raise ValueError(
                f"task {name} has no option {keyword.arg!r}; known: {', '.join(accepted) or 'none'}"
            )
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ValueError(f"task {name}: {keyword.arg} must be a plain value") from None
    task = known[name](data, **options)
    if not isinstance(task, Task):
        raise ValueError(f"{spec} must return a thinwire.lab.tasks.Task, it returned {task!r}")
    return task


def _needed(data: Path | None, task: str, files: str) -> Path:
    if data is None:
        raise ValueError(f"task {task} reads {files}: say where with --data")
    return Path(data)


def _functions_of(file: Path) -> dict[str, Callable[..., Task]]:
    if not file.is_file():
        raise ValueError(f"missing file: {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: thing for name, thing in vars(module).items() if inspect.isfunction(thing)}
