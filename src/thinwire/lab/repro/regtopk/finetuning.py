"""The authors' protocol on images: weights learnt elsewhere, a new head, gradients after local steps, softmax twice.

Differs from theirs: they start from ImageNet's weights and learn CIFAR-10. Here a network learns half of the labels,
and it is the other half that it is then tuned to, in far fewer rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.report import intervals
from thinwire.lab.repro.claims import OURS, Claim, Findings, Listing
from thinwire.lab.repro.regtopk.images import DENSITIES, FIRST_SEED, TOPK, ImageRun, Outcome, Row, rows_at, with_spread
from thinwire.lab.tasks.datasets import Dataset, Examples
from thinwire.lab.tasks.resnets import resnet18

LOCAL = {1: 120, 8: 40, 40: 16}  # local steps, rounds
RATE = 0.01  # the authors', of local and of common steps
EARLY = 10  # rounds, of which the re-sent share is told apart
LEARNING_STEPS, LEARNING_BATCH, LEARNING_RATE = 300, 160, 0.1  # of what is learnt before
DENSITY = DENSITIES[1]  # that of the authors' script


@dataclass(frozen=True)
class Start:
    """Where all workers begin: a model that has learnt the first half of the labels, with a new head for the other."""

    model: nn.Module
    dataset: Dataset  # of the other half


def started(dataset: Dataset, seed: int, width: int = 8, steps: int = LEARNING_STEPS) -> Start:
    labels = int(dataset.train.targets.max()) + 1
    known, new = (_of_labels(dataset, *ends) for ends in ((0, labels // 2), (labels // 2, labels)))
    torch.manual_seed(seed)
    model = resnet18(dataset.train.inputs.shape[1], width=width, classes=labels - labels // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    batches = known.train.batches(min(LEARNING_BATCH, len(known.train)), seed=seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / steps)
        examples = next(batches)
        optimizer.zero_grad()
        functional.cross_entropy(model(examples.inputs), examples.targets).backward()
        optimizer.step()
    head = model[-1]
    assert isinstance(head, nn.Linear)
    head.reset_parameters()
    return Start(model, new)


def _of_labels(dataset: Dataset, first: int, end: int) -> Dataset:
    """The examples of some of the labels, counted from 0."""

    def among(examples: Examples) -> Examples:
        chosen = (examples.targets >= first) & (examples.targets < end)
        return Examples(examples.inputs[chosen], examples.targets[chosen] - first)

    return Dataset(among(dataset.train), among(dataset.test))


def tuned(start: Start, local: int, row: Row, training: ImageRun, seed: int) -> Outcome:
    return training.trained(copy.deepcopy(start.model), partial(after_local_steps, local), row, start.dataset, seed)


def after_local_steps(
    local: int, model: nn.Module, parameters: Mapping[str, Tensor], stream: Iterator[Examples]
) -> dict[str, Tensor]:
    """The gradient of the last of so many steps; where the others led is forgotten. Softmax comes twice."""
    common = [tensor.detach().clone() for tensor in parameters.values()]
    for step in range(local):
        examples = next(stream)
        loss = functional.cross_entropy(model(examples.inputs).softmax(1), examples.targets)
        grads = torch.autograd.grad(loss, list(parameters.values()))
        if step + 1 == local:
            break
        with torch.no_grad():
            for tensor, grad in zip(parameters.values(), grads, strict=True):
                tensor.sub_(grad, alpha=RATE)
    with torch.no_grad():
        for tensor, before in zip(parameters.values(), common, strict=True):
            tensor.copy_(before)
    return dict(zip(parameters, grads, strict=True))


def add_table(source: str, dataset: Dataset, found: Findings) -> None:
    """Every setting once, then the next seed; of one that is stopped, the seeds that all settings have."""
    settings = [(local, row) for local in LOCAL for row in rows_at(DENSITY, quick=True)[2:]]
    starts: dict[int, Start] = {}

    def run(plan: tuple[int, int, Row]) -> Outcome:
        seed, local, row = plan
        if seed not in starts:
            found.progress(f"fine-tuning: what is learnt before, seed {seed}")
            starts[seed] = started(dataset, seed)
        found.progress(f"fine-tuning: {row.title}, {local} local steps, seed {seed}")
        return tuned(starts[seed], local, row, ImageRun(rounds=LOCAL[local], rate=RATE), seed)

    seeds = range(FIRST_SEED, FIRST_SEED + found.seeds)
    outcomes = found.stop.all([(seed, *setting) for seed in seeds for setting in settings], run)
    whole = seeds[: len(outcomes) // len(settings)]
    runs = {setting: [outcomes[(seed, *setting)] for seed in whole] for setting in settings} if whole else {}
    found.tables.append(_table(source, runs, len(whole)))
    found.claims += [_fading(source, local, each) for (local, row), each in runs.items() if row.title == TOPK]


def _table(source: str, runs: Mapping[tuple[int, Row], Sequence[Outcome]], seeds: int) -> Listing:
    rows = []
    for (local, row), outcomes in runs.items():
        against = next(each for (other, peer), each in runs.items() if other == local and peer.title == TOPK)
        margin = intervals.paired([each.accuracy for each in outcomes], [each.accuracy for each in against])
        shares = (slice(1, 2), slice(1, EARLY), slice(EARLY, None))
        rows.append([
            local, LOCAL[local], row.title, with_spread([each.accuracy for each in outcomes]),
            "" if row.title == TOPK else margin.text(),
            *(f"{mean(mean(each.resent[part]) for each in outcomes):.1%}" for part in shares),
        ])  # fmt: skip
    columns = [
        "local steps", "rounds", "scheme", "test accuracy, %", "points against Top-k",
        "re-sent, round 2", f"rounds 2 to {EARLY}", "later",
    ]  # fmt: skip
    return Listing(
        f"A new head on what other labels taught, {source}, density {DENSITY:.2%}, {seeds} seeds", columns, rows
    )


def _fading(source: str, local: int, outcomes: Sequence[Outcome]) -> Claim:
    early, late = ([mean(each.resent[part]) for each in outcomes] for part in (slice(1, EARLY), slice(EARLY, None)))
    return Claim(
        claim=f"{source}, gradients after {local} local steps: what the regulariser can act on is most at the start",
        measured=f"{mean(early):.1%} of what is sent in rounds 2 to {EARLY}, {mean(late):.1%} later",
        expected="less later",
        verdict=intervals.verdict(intervals.paired(early, late)),
        source=OURS,
        reason=f"in the first rounds, seed by seed: {', '.join(f'{share:.1%}' for share in early)}",
    )
