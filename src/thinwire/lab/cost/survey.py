"""What advice rests on: a link, a host, rehearsed steps of every scheme, and what it costs the workers to meet.

`survey` runs on every worker of a group, on a model of theirs; `Survey` is what they found, the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.hierarchical import Hierarchical
from thinwire.exchange.objects import all_gather_objects
from thinwire.lab.cost import link as links
from thinwire.lab.cost import noise
from thinwire.lab.cost.model import BucketTrace, Host, Link, Prediction, Step
from thinwire.lab.cost.noise import Gradients
from thinwire.lab.cost.rehearsal import Barrier, perform, rehearse
from thinwire.lab.cost.replay import predict, predict_rounds
from thinwire.lab.runs.curves import BASELINE
from thinwire.lab.tasks.tasks import load_task

STEPS = 6  # rehearsed for every scheme, by every worker
MEETINGS = 12
ON_LEVELS = ", two levels"  # after a scheme's name


@dataclass(frozen=True)
class Survey:
    """What was measured of a group that trains a model. Steps are as the slowest worker makes them."""

    parameters: int
    workers: int
    link: Link
    host: Host
    meeting: list[Step]  # rehearsed
    meeting_seconds: float  # the same steps for real
    steps: dict[str, list[Step]]
    performed: dict[str, float] = field(default_factory=dict)  # seconds per step, measured; where asked for
    errors: dict[str, float] = field(default_factory=dict)  # of what one worker says of its gradient, without memory
    gradients: Gradients | None = None  # None: there is no model and no batch

    def predict(self, scheme: str, bits_per_second: float | None = None, *, every: int = 1) -> Prediction:
        """A step under `scheme`, over the link as it is or at another bandwidth; one of `every` that share an exchange.

        A step in which workers meet, and exchange nothing, takes longer for real than in the replay: no two
        workers are equally fast, and all wait for the slowest. Every scheme is given that time on top.
        """
        link = self.link if bits_per_second is None else self.link.at(bits_per_second, self.host)
        if every == 1:
            return predict(self.steps[scheme], link, self.host).waiting(self.straggling_seconds)
        shared = predict_rounds(self.steps[scheme], link, self.host, every=every)
        return shared.waiting(self.straggling_seconds / every)

    @cached_property
    def straggling_seconds(self) -> float:
        return max(0.0, self.meeting_seconds - predict(self.meeting, self.link, self.host).seconds)


def survey(
    model: DistributedDataParallel,
    train: Callable[[], object],
    schemes: Sequence[str],
    *,
    exchange: Callable[[], AllReduce] = AllReduce,
    restore: Callable[[], object] = lambda: None,
    performed_steps: int = 0,
    local: int = 1,
    tell: Callable[[str], object] = lambda text: None,
    learns: bool = True,
) -> Survey:
    """Measure the group of `model`. Every worker calls it with the same schemes and gets the same survey.

    local: machines have so many workers each, one machine's ranks after the other; above 1, fp16 is surveyed as it
        is, and every scheme on two levels (`thinwire.Hierarchical`).
    train: one step, without anything that lasts but gradients (what lasts is undone by `restore`, between steps).
    performed_steps: train so many steps under every scheme for real, too, right after rehearsing it.
    tell: called with what is measured next, in words.
    learns: its gradients are those of a loss, so that the noise in them says something (see `noise`).
    """
    group = model.process_group
    assert isinstance(group, dist.ProcessGroup)
    workers, device = dist.get_world_size(group), next(model.parameters()).device

    def meet() -> None:
        links.meet(group, device)

    def rehearsed(scheme: str | Barrier, steps: int = STEPS, *, local: int = 1) -> list[Step]:
        return rehearse(model, train, scheme, workers=workers, steps=steps, local=local, restore=restore, meet=meet)

    def real(scheme: str | Barrier, steps: int, *, local: int = 1) -> list[float]:
        how = exchange() if local == 1 else Hierarchical.of_nodes(local)
        return perform(model, train, scheme, exchange=how, steps=steps, restore=restore)

    restore()
    with model.no_sync():
        train()
    own = noise.brought({name: p.grad for name, p in model.module.named_parameters() if p.grad is not None})
    gradients, sampled = noise.measure(own, group, device) if learns else None, noise.sample(own)
    tell("the link")
    link = links.measure_levels(exchange, group, local, device)
    host = links.host(group, device)
    meeting = rehearsed(Barrier(), MEETINGS)
    met = real(Barrier(), MEETINGS)
    steps, performed, errors = {}, {}, {}
    flat = {scheme: (scheme, 1) for scheme in schemes if local == 1 or scheme == BASELINE}
    named = flat | {f"{scheme}{ON_LEVELS}": (scheme, local) for scheme in schemes if local > 1}
    for number, (name, (scheme, level)) in enumerate(named.items(), 1):
        tell(f"{name}, {number} of {len(named)}")
        errors[name] = noise.message_error(scheme, sampled)
        steps[name] = rehearsed(scheme, local=level)
        if performed_steps:
            performed[name] = mean(real(scheme, performed_steps, local=level))
            # Before and after, so that what disturbs the machine disturbs both.
            steps[name] += rehearsed(scheme, local=level)

    seen = [_lists(meeting), mean(met), {scheme: _lists(each) for scheme, each in steps.items()}, performed, errors]
    everybody = all_gather_objects(seen, group, device)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Survey(
        parameters, workers, link, host,
        meeting=slowest([_steps(each[0]) for each in everybody]),
        meeting_seconds=mean(each[1] for each in everybody),
        steps={scheme: slowest([_steps(each[2][scheme]) for each in everybody]) for scheme in steps},
        performed={scheme: mean(each[3][scheme] for each in everybody) for scheme in performed},
        errors={scheme: mean(each[4][scheme] for each in everybody) for scheme in errors},
        gradients=gradients,
    )  # fmt: skip


def _lists(steps: Sequence[Step]) -> list[Any]:
    return [step.as_lists() for step in steps]


def _steps(lists: Sequence[list[Any]]) -> list[Step]:
    return [Step.of_lists(each) for each in lists]


def slowest(workers: Sequence[Sequence[Step]]) -> list[Step]:
    """The steps of several workers that ask the same of each other as those of one that is always the slowest.

    Who is slow changes from one turn to the next, and all wait for that one.
    """
    found = []
    for steps in zip(*workers, strict=True):
        buckets = []
        for each in zip(*(step.buckets for step in steps), strict=True):
            turns = tuple(
                replace(turn[0], encode_seconds=max(one.encode_seconds for one in turn))
                for turn in zip(*(bucket.turns for bucket in each), strict=True)
            )
            buckets.append(BucketTrace(max(bucket.ready for bucket in each), turns))
        compute_seconds = max(step.compute_seconds for step in steps)
        found.append(replace(steps[0], compute_seconds=compute_seconds, buckets=tuple(buckets)))
    return found


def of_task(
    exchange: Callable[[], AllReduce], spec: str, data: Path | None, schemes: Sequence[str], performed_steps: int,
    local: int = 1, tell: Callable[[str], object] = lambda text: None,
) -> Survey:  # fmt: skip
    """Survey the default group, each worker training its shard of a task of the lab."""
    task = load_task(spec, data)
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer(model.parameters())
    shard = task.dataset.train.shard(dist.get_rank(), dist.get_world_size(), seed=0, skew=task.skew)
    batches = shard.batches(task.batch, seed=dist.get_rank())
    kept = [parameter.detach().clone() for parameter in model.parameters()]

    def train() -> None:
        batch = next(batches)
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()

    @torch.no_grad()
    def restore() -> None:
        # Rehearsed steps apply gradients that nobody else has: the weights would run off.
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)

    return survey(
        model, train, schemes, exchange=exchange, restore=restore, performed_steps=performed_steps, local=local,
        tell=tell,
    )  # fmt: skip


def of_size(
    exchange: Callable[[], AllReduce], parameters: int, compute_seconds: float, schemes: Sequence[str], local: int = 1,
    tell: Callable[[str], object] = lambda text: None,
) -> Survey:  # fmt: skip
    """Survey the default group on a model that is nothing but matrices, taken to compute for `compute_seconds`."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Matrices(parameters))

    def train() -> None:
        model.zero_grad()
        model(torch.ones(())).backward()

    found = survey(model, train, schemes, exchange=exchange, local=local, tell=tell, learns=False)
    steps = {name: [step.computing(compute_seconds) for step in each] for name, each in found.steps.items()}
    return replace(found, steps=steps)


class Matrices(nn.Module):
    """`parameters` weights in matrices of 1024 x 1024, and what is left. Their gradients are themselves."""

    def __init__(self, parameters: int):
        super().__init__()
        rows = [1024] * (parameters // 1024**2) + [parameters % 1024**2 // 1024]
        left = parameters % 1024
        shapes = [(r, 1024) for r in rows if r] + [(left,)] * bool(left)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, scale: Tensor) -> Tensor:
        return scale * 0.5 * torch.stack([weight.square().sum() for weight in self.weights]).sum()
