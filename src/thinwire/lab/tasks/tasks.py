"""Tasks: a model, examples, a loss, a fixed evaluation. `load_task` makes one of spec text.

Spec text is a name with options, such as "mlp", "cnn(skew=0.9)" or, for your own, "path.py:function": a
function that takes the data path (or None) first, keyword options after it, and returns a `Task`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.tasks import datasets, models, resnets
from thinwire.lab.tasks.datasets import Dataset, Examples

EVALUATIONS = 20  # of a run: its curve has so many points


@dataclass(frozen=True)
class Metric:
    """What a model is evaluated by: one value per example, of which the mean counts."""

    name: str
    values: Callable[[Tensor, Tensor], Tensor]  # of outputs and targets
    rising: bool  # more is better

    @torch.no_grad()
    def of(self, model: nn.Module, examples: Examples) -> Tensor:
        """The value of every example, a few hundred at a time."""
        parts = (examples[slice(at, at + 256)] for at in range(0, len(examples), 256))
        return torch.cat([self.values(model(part.inputs), part.targets) for part in parts])


@dataclass(frozen=True)
class Task:
    """What is learnt and how it is evaluated. It does not know about workers' links, schemes or exchanges."""

    name: str
    dataset: Dataset
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]  # of outputs and targets
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    metric: Metric
    steps: int
    target: float | None = None  # None: what the baseline holds near its end
    batch: int = 32  # examples per worker and step
    evaluate_every: int = 0  # steps; 0: EVALUATIONS times in all
    skew: float = 0.0  # higher => the workers' shards differ more; 0: alike, 1: each its own labels

    def __post_init__(self) -> None:
        if not 0 <= self.skew <= 1:
            raise ValueError(f"skew must be within 0..1, got {self.skew}")
        for name, least in (("steps", 1), ("batch", 1), ("evaluate_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def evaluates(self, step: int, steps: int) -> bool:
        """Whether the model is evaluated after `step` (counted from 1) of `steps`; always after the last."""
        return step % (self.evaluate_every or max(1, steps // EVALUATIONS)) == 0 or step == steps


accuracy = Metric("accuracy", lambda outputs, labels: (outputs.argmax(-1) == labels).float(), rising=True)
bits_per_byte = Metric(
    "bits per byte",
    lambda logits, text: functional.cross_entropy(logits.mT, text.long(), reduction="none").mean(1) / math.log(2),
    rising=False,
)
squared_error = Metric("squared error", lambda outputs, y: (outputs - y).square().sum(-1), rising=False)


def mlp(data: Path | None, *, width: int = 2048) -> Task:
    """The embedded images and a multi-layer perceptron of 5.8 M weights: little to compute, much to send."""
    return _classification("mlp", datasets.embedded_images(), lambda: models.mlp(width), lr=0.2, steps=120, batch=64)


def cnn(data: Path | None) -> Task:
    """The embedded images and a convolutional network of 0.6 M weights: more to compute than to send."""
    return _classification("cnn", datasets.embedded_images(), models.cnn, lr=0.1, steps=120)


def fashion(data: Path | None) -> Task:
    """All of Fashion-MNIST, from its idx files in --data, and the convolutional network."""
    dataset = datasets.fashion_mnist(_needed(data, "fashion", "the four Fashion-MNIST idx .gz files"))
    return _classification("fashion", dataset, models.cnn, lr=0.1, steps=400)


def cifar10(data: Path | None, *, width: int = 8) -> Task:
    """CIFAR-10, from the binary version's files in --data, and ResNet-18's topology with batch norm at an eighth of its
    width: 0.18 M weights.
    """
    dataset = datasets.cifar10(_needed(data, "cifar10", "the CIFAR-10 .bin files"))
    return _classification("cifar10", dataset, lambda: resnets.resnet18(3, width=width), lr=0.05, steps=400)


def text(data: Path | None, *, width: int = 128) -> Task:
    """A transformer of 0.5 M weights learns to predict the next byte of the text file in --data; without it, of the
    language reference that comes with Python, a text of half a megabyte.
    """
    return Task(
        name="text",
        dataset=datasets.text_bytes(data, context=64) if data else datasets.python_reference(context=64),
        model=lambda: models.ByteTransformer(width=width, layers=2, heads=4, context=64),
        loss=lambda logits, text: functional.cross_entropy(logits.flatten(0, 1), text.flatten().long()),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=8e-3),
        metric=bits_per_byte,
        steps=200,
        batch=16,
    )


def regression(data: Path | None) -> Task:
    """Linear regression, 512 features to 64 outputs: convex, so what a scheme loses shows undisguised."""
    return Task(
        name="regression",
        dataset=datasets.regression(features=512, outputs=64, noise=0.1),
        model=lambda: nn.Linear(512, 64),
        loss=lambda outputs, y: (outputs - y).square().sum(-1).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        metric=squared_error,
        steps=150,
        batch=64,
    )


def _classification(
    name: str,
    dataset: Dataset,
    model: Callable[[], nn.Module],
    *,
    lr: float,
    steps: int,
    batch: int = 32,
) -> Task:
    return Task(
        name=name,
        dataset=dataset,
        model=model,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True),
        metric=accuracy,
        steps=steps,
        batch=batch,
    )


# What any task takes in its spec text, beside the options of its own function.
OPTIONS = ("target", "steps", "batch", "evaluate_every", "skew")
TASKS: dict[str, Callable[..., Task]] = {task.__name__: task for task in (mlp, cnn, fashion, cifar10, text, regression)}


def load_task(spec: str, data: Path | None = None) -> Task:
    """The task that `spec` describes. Nothing of the spec is evaluated: options are literals."""
    path, _, call_text = spec.strip().rpartition(".py:")
    try:
        call = ast.parse(call_text, mode="eval").body
    except SyntaxError:
        call = None
    if isinstance(call, ast.Name):
        call = ast.Call(call, [], [])
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"cannot read the task {spec!r}; it looks like 'mlp', 'cnn(skew=0.9)' or 'path.py:function'")

    name = call.func.id
    known = _functions_of(Path(path + ".py")) if path else TASKS
    if name not in known:
        also = "" if path else " and path.py:function"
        raise ValueError(f"unknown task {name!r}; known: {', '.join(known)}{also}")
    own = [p.name for p in inspect.signature(known[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in (*own, *OPTIONS):
            raise ValueError(f"task {name} has no option {keyword.arg!r}; known: {', '.join((*own, *OPTIONS))}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ValueError(f"task {name}: {keyword.arg} must be a plain value") from None
    task = known[name](data, **{option: options.pop(option) for option in own if option in options})
    if not isinstance(task, Task):
        raise ValueError(f"{spec} must return a thinwire.lab.tasks.tasks.Task, it returned {task!r}")
    try:
        return replace(task, **options)
    except TypeError as error:
        raise ValueError(f"task {spec}: {error}") from None


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
    own = (thing for thing in vars(module).values() if inspect.isfunction(thing))
    return {thing.__name__: thing for thing in own if thing.__module__ == module.__name__}
