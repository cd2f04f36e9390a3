"""A ServerOptimizer's gradients and weights on a device that is played: nobody waits for a copy, or comes before it."""

import pytest
import torch

from helpers.played import HostWait, PlayedLandings, TooEarly, on_a_device
from thinwire.exchange.lane import Landings
from thinwire.exchange.server.pushpull import PushPull
from thinwire.exchange.server.sharding import Owners
from thinwire.schemes import parse

SHAPES = {"w": (40, 40), "v": (33, 47), "b": (11,), "none": (5,)}
STEPS = 3


class Echo:
    """Servers that keep what is pushed, and answer with weights that tell the step and the server."""

    def __init__(self, worker):
        self.worker, self.workers, self.owners = worker, 2, Owners(2)
        self.pushed = []

    def trade(self, kind, asks, step, level):
        for server, operation, data, answer in asks:
            self.pushed.append(data.clone())
            weights = torch.arange(operation.numel) + 1000 * len(self.pushed) + server
            answer.view(getattr(torch, operation.down)).copy_(weights)


def parameters(dtype):
    made = {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    for number, (name, parameter) in enumerate(made.items()):
        parameter.data += number
        if name != "none":
            parameter.grad = torch.zeros_like(parameter)
    return made


def train(spec, down, dtype=torch.float32, worker=0, prepare=lambda one, tensors: None):
    """What a training loop does; all that was pushed, and the weights after each step."""
    made = parameters(dtype)
    exchange = Echo(worker)
    one = PushPull(exchange, list(made.items()), parse(spec), down, 0)
    prepare(one, [*made.values(), *(each.grad for each in made.values() if each.grad is not None)])
    one.pull(first=True)
    found = []
    for step in range(STEPS):
        found += [parameter.data * 1 for parameter in made.values()]
        for number, parameter in enumerate(made.values()):
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.data).mul_(0.001 * step).add_(number)
        one.trade()
    return exchange.pushed + found + [parameter.data * 1 for parameter in made.values()]


def on_played(device):
    def prepare(one, tensors):
        one._landings = PlayedLandings(device)
        one._delivered = one._landings.mark()
        device.bring(*tensors)

    return prepare


@pytest.mark.parametrize(
    ("spec", "down", "dtype"),
    [
        ("fp32", "float32", torch.float32),
        ("qsgd(bits=4)", "float16", torch.float32),
        ("signsgd", "float32", torch.bfloat16),
    ],
)
def test_what_is_pushed_and_pulled_is_the_cpu_s(spec, down, dtype, monkeypatch):
    wanted = train(spec, down, dtype)
    with monkeypatch.context() as patch, on_a_device(patch, watch_flights=True) as device:
        landings = []

        def prepare(one, tensors):
            on_played(device)(one, tensors)
            landings.append(one._landings)

        found = train(spec, down, dtype, prepare=prepare)
    assert len(found) == len(wanted) > 2 * STEPS
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert landings[0].waits == 2 * (1 + STEPS), "once for all gradients, once before weights' memory is used again"


@pytest.mark.parametrize("worker", [0, 1])
def test_a_wait_that_is_forgotten_is_found(worker, monkeypatch):
    """The first worker reads weights that it fetches; the other, who fetches nothing, has new ones written over old."""
    with monkeypatch.context() as patch, on_a_device(patch, watch_flights=True) as device:
        patch.setattr(device, "land", lambda mark: None)
        one = PushPull(Echo(worker), list(parameters(torch.float32).items()), parse("fp32"), "float32", 0)
        on_played(device)(one, [parameter for _, parameter in one.parameters])
        if worker:
            one.pull(first=True)
        with pytest.raises(TooEarly, match=r"aten::c\w+ against a copy of training that is not over"):
            one.pull(first=True)


def test_a_copy_that_is_waited_for_is_found(monkeypatch):
    whole = torch.Tensor.copy_

    def blocking(tensor, source, non_blocking=False):
        return whole(tensor, source)

    with monkeypatch.context() as patch, on_a_device(patch, watch_flights=True) as device:
        patch.setattr(torch.Tensor, "copy_", blocking)
        with pytest.raises(HostWait, match="that is waited for"):
            train("fp32", "float32", prepare=on_played(device))


def test_without_a_device_there_is_nothing_to_wait_for():
    landings = Landings({torch.device("cpu")})
    assert landings.mark() == []
    landings.wait(landings.mark())
