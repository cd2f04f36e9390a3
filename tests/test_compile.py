"""torch.compile: inside DDP, around DDP, and with DDP's buckets cut into the graph."""

import shutil

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.frameworks import Net
from helpers.training import assert_equal, assert_replicas_equal, train
from helpers.world import run_world
from thinwire.integrations.models import parallel

SPEC = "topk(density=0.1)"


class Wide(Net):
    """Of more than a megabyte in every other layer: DDP's first bucket has one."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 520), *(nn.Linear(520, 520) for _ in range(2)), nn.Linear(520, 7))


class Graphs:
    """A backend that counts the graphs it is given, and computes as PyTorch does without it."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager  # slow to import

        self.count += 1
        return aot_eager(graph, inputs)


def trained(model, spec=SPEC):
    """Weights, what is owed by name, and the wire's state, after some steps."""
    with tw.attach(model, spec, feedback=True) as wire:
        weights = train(model, 3)
        assert wire.stats()["steps"] == 3
        return weights, dict(wire.memory.items()), wire.state_dict()


def _compiled():
    plain, owed, _ = trained(DDP(Net()))
    for compiled in (
        lambda backend: DDP(torch.compile(Net(), backend=backend)),
        lambda backend: torch.compile(DDP(Net()), backend=backend),
    ):
        backend = Graphs()
        torch.compiler.reset()
        weights, other, state = trained(compiled(backend))
        assert backend.count == 1
        assert_equal(plain, weights)
        assert list(other) == list(owed)  # names are the model's, compiled or not
        assert_equal(list(owed.values()), list(other.values()))
    with tw.attach(DDP(Net()), SPEC) as wire:
        wire.load_state_dict(state)

    torch.compiler.reset()
    torch.manual_seed(0)
    wide, backend = Wide(), Graphs()
    start = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    # Not Top-k, which chooses over a bucket: gradients are ready in another order, and DDP makes other buckets of them.
    around = torch.compile(DDP(wide, bucket_cap_mb=1), backend=backend)
    assert parallel(around, "") is around._orig_mod  # so do adapters
    cut, _, _ = trained(around, "qsgd(bits=4)")
    assert backend.count > 1, "DDPOptimizer has cut nothing"
    wide.load_state_dict(start)
    assert_equal(cut, trained(DDP(wide, bucket_cap_mb=1), "qsgd(bits=4)")[0])
    return cut


def test_compiled_models_train_as_others_do():
    assert_replicas_equal(run_world(_compiled, 2))


def _to_machine_code():
    compiled = trained(torch.compile(DDP(Net())))[0]
    return compiled, trained(DDP(Net()))[0]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles its CPU code by g++")
def test_compiled_to_machine_code():
    """Its arithmetic is in another order, so the choice of entries may differ now and then."""
    results = run_world(_to_machine_code, 2, timeout=170)
    assert_replicas_equal([compiled for compiled, _ in results])
    for compiled, plain in zip(*results[0], strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=1e-3)
