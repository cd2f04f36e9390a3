"""What becomes of attached models: copied, saved, dropped, joined with uneven inputs, differentiated twice."""

import copy
import gc
import io
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import thinwire as tw
from helpers.models import digest, mlp
from helpers.training import MANY_BUCKETS, assert_equal, assert_replicas_equal, loss_of, train
from helpers.world import run_world


def _saved_and_loaded(model):
    raw = io.BytesIO()
    torch.save(model, raw)
    raw.seek(0)
    return torch.load(raw, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "average": lambda model: AveragedModel(model).module, "file": _saved_and_loaded}


def _copies():
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    found = []
    for closed in (False, True):
        wire = tw.attach(model, "qsgd")
        train(model, 2)
        if closed:
            wire.close()
        for name, made in COPIES.items():
            twin = made(model)
            assert_equal(digest(model), digest(twin))
            plain = train(copy.deepcopy(twin), 2)
            with tw.attach(twin, "fp32") as second:  # the copy is a model of its own, plain until it is attached
                assert_equal(train(twin, 2), plain)
                assert second.stats()["bytes_sent"] > 0, name
            found += plain
        wire.close()
    return found


def test_attached_models_can_be_copied_averaged_and_saved():
    assert_replicas_equal(run_world(_copies, 2))


def _lanes_and_groups():
    lanes = [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]
    return len(lanes), len(dist.distributed_c10d._world.pg_map)


def _dropped():
    before = _lanes_and_groups()
    for spec in ("fp16", "qsgd", "topk", "qsgd") * 2:
        model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
        tw.attach(model, spec)
        train(model, 2)
        del model
        gc.collect()
    deadline = time.monotonic() + 30
    while _lanes_and_groups() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, _lanes_and_groups()


def test_a_model_dropped_without_close_leaves_no_thread_and_no_group():
    for before, after in run_world(_dropped, 2):
        assert before == after


def _join_by_the_living(spec):
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    refused = pytest.raises(RuntimeError, match="divide_by_initial_world_size")
    with tw.attach(model, spec), refused, model.join(divide_by_initial_world_size=False):
        train(model, 2)
    return True


@pytest.mark.parametrize("spec", ["fp16", "qsgd"])
def test_join_that_divides_by_the_living_is_refused(spec):
    assert run_world(_join_by_the_living, 2, spec) == [True, True]


class One(nn.Module):
    """One parameter: DDP itself cannot put the graphs of two into a bucket."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(20, 70))

    def forward(self, x):
        return (x @ self.weight).tanh()[:, :7]


def _graph_building_backward():
    found = []
    for spec, exempt in ((None, ()), ("fp32", ()), ("qsgd", ["weight"]), ("topk", ["weight"]), ("qsgd", ())):
        model = DDP(One())
        wire = tw.attach(model, spec, exempt=exempt) if spec else None
        for step in range(2):
            model.zero_grad()
            loss_of(model, step).backward(create_graph=True)
        found.append(model.module.weight.grad.detach().clone())
        if wire is not None:
            wire.close()
    return found


@pytest.mark.filterwarnings("ignore")
def test_backward_that_builds_a_graph():
    results = run_world(_graph_building_backward, 2)
    assert_replicas_equal(results)
    plain, fp32, *exempt, quantised = results[0]
    assert torch.equal(plain, fp32)
    assert all(torch.equal(plain, each) for each in exempt)
    torch.testing.assert_close(quantised, plain, atol=float(plain.abs().max()), rtol=0)


def _all_exempt():
    with pytest.warns(UserWarning, match="all tensors are exempt, so qsgd has nothing to compress"):
        tw.attach(DDP(mlp()), "qsgd", exempt=["*"]).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tw.attach(DDP(mlp()), "fp16", exempt=["*"]).close()
        tw.attach(DDP(mlp()), "qsgd").close()
    return True


def test_a_wire_with_nothing_to_compress_says_so():
    assert run_world(_all_exempt, 1) == [True]
