"""What a scheme's error costs in steps: the noise rule.

A step follows the mean gradient, whose true part is S = |gradient|^2; all else in it is noise. With n workers, each of
whose gradients g has a squared length |g|^2, of which sigma^2 = |g|^2 - S is that of its batch, and a scheme whose
message errs by e |g|^2:

    N = sigma^2 / n + e |g|^2 / n        and e |mean|^2 more, where the mean comes back compressed, too
    steps to the same accuracy grow with 1 + KAPPA N / S

KAPPA is one number, chosen on runs of one task: read what follows from it as an order of schemes, not as seconds. S
falls while training goes on, so what an error costs is more near the end than at the weights that it was measured at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.partition import small
from thinwire.core.scheme import Codec
from thinwire.core.sketch import sketch
from thinwire.exchange.exchange import CPU
from thinwire.exchange.objects import all_gather_objects, device_of
from thinwire.exchange.simulation import Simulation
from thinwire.lab.cost.link import settle
from thinwire.lab.tasks.estimates import vnmse
from thinwire.schemes import parse

KAPPA = 0.15
NOTHING = 1.0  # the error of a message that says nothing at all: what errs as much is never recommended
BEARABLE = 0.25  # recommended without a model and a batch: only what errs by no more than this
SAMPLE = 4_000_000  # elements that errors are measured on
SKETCH = 1 << 16  # numbers that stand for a whole gradient


@dataclass(frozen=True)
class Gradients:
    """What the gradients of a group are like, at the weights as they are."""

    workers: int
    each: float  # |g|^2, the mean over workers
    signal: float  # S

    def steps(self, error: float, *, back: bool = False) -> float:
        """Steps to the same accuracy, against those without any noise."""
        own = max(0.0, self.each - self.signal) / self.workers
        noise = own + error * self.each / self.workers + (error * (self.signal + own) if back else 0.0)
        return 1 + KAPPA * noise / self.signal


def brought(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory; those of a device are pinned, so that all are on their way before one is waited for."""
    found = {}
    for name, tensor in gradients.items():
        found[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        found[name].copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in gradients.values()}:
        settle(device)
    return found


def measure(local: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device = CPU) -> Gradients:
    """Of every worker's own gradient. What passes between them is a sketch: few numbers whose squared length is that of
    the whole, but for half a percent.
    """
    flat = torch.cat([tensor.reshape(-1).float() for tensor in local.values()])
    workers = dist.get_world_size(group)
    mean = sketch(flat, SKETCH).to(device_of(group, device))
    dist.all_reduce(mean, group=group)
    each = sum(all_gather_objects(flat.double().square().sum().item(), group, device)) / workers
    together = (mean / workers).square().sum().item()
    signal = (workers * together - each) / (workers - 1)
    return Gradients(workers, each, max(signal, 0.01 * each))  # what is all noise has no measurable signal


def sample(local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that get compressed, the largest first, until there are SAMPLE elements."""
    found: dict[str, Tensor] = {}
    for name, tensor in sorted(local.items(), key=lambda item: -item[1].numel()):
        if not small(tensor.shape, tensor.numel()) and sum(t.numel() for t in found.values()) < SAMPLE:
            found[name] = tensor.detach().float().clone()
    return found


def message_error(spec: str, tensors: Mapping[str, Tensor]) -> float:
    """|g - ghat|^2 / |g|^2 of what one worker says of its gradient, without error feedback."""
    if not tensors:
        return 0.0
    return vnmse(Simulation(spec, workers=1, feedback=False).reduce([tensors]), dict(tensors))


def bearable(spec: str, error: float, gradients: Gradients | None) -> bool:
    """Whether a scheme may be recommended: its error is small by itself, or the rule tells what it costs."""
    return error <= BEARABLE or (gradients is not None and covered(spec, error) and error < NOTHING)


def covered(spec: str, error: float) -> bool:
    """Whether a scheme's error is noise. What a biased one leaves out comes later, by its error feedback: where that is
    much, the rule does not know what it costs.
    """
    return error <= BEARABLE or parse(spec).unbiased


def comes_back_compressed(spec: str, workers: int) -> bool:
    """Whether a two-shot encodes the mean once more."""
    scheme = parse(spec)
    return isinstance(scheme, Codec) and scheme.grain is not None and not scheme.exact and workers > 2
