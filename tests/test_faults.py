"""Dead ranks, errors on the lane, and leaving in every order: clear errors, no hang, nothing left behind."""

import json

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import mlp
from helpers.ranks import launch, outcome
from helpers.world import run_world

START = """
import datetime, os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import thinwire as tw
from helpers.models import mlp
from helpers.faults import Broken, cycles
from helpers.training import train
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
rank = dist.get_rank()
model = DDP(mlp(), bucket_cap_mb=0.01)
"""


def ends(script: str, workers: int, timeout: float = 90) -> list[tuple[int, str, str]]:
    processes = launch(START + script, workers)
    return [outcome(process, timeout) for process in processes]


def test_an_error_on_the_lane_surfaces_in_training_with_its_traceback():
    zero, one = ends("tw.attach(model, Broken()); train(model, 5)", 2)
    code, _, err = zero
    assert code == 1
    assert "ArithmeticError: the scheme is broken" in err and "in converse" in err
    assert "RuntimeError: the gradients of step 2 could not be exchanged: the scheme is broken" in err
    assert "in train" in err  # raised where the user called backward
    code, _, err = one
    assert code == 1 and "could not be exchanged" in err


@pytest.mark.parametrize("spec", ["fp32", pytest.param("fp16", marks=pytest.mark.full), "qsgd"])
def test_a_rank_that_dies_mid_step_is_an_error_everywhere_else(spec):
    dying = f"""
wire = tw.attach(model, {spec!r})
train(model, 3)
if rank == 2:
    model.module[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
train(model, 3)
"""
    results = ends(dying, 3)
    assert results[2][0] == -9
    for code, _, err in results[:2]:
        assert code == 1, err  # an error, not an abort at exit (-6) nor a hang
        assert "the gradients of step 3 could not be exchanged" in err


@pytest.mark.parametrize("ranks, shards", [(2, 2), (2, 1)], ids=["between shards", "between replicas"])
def test_under_fsdp_a_rank_that_dies_mid_step_is_an_error_everywhere_else(ranks, shards):
    dying = f"""
from helpers.sharded import loss_of, meshes, sharded
mesh = meshes({shards})
model = sharded(mesh["shard"])
wire = tw.attach(model, "qsgd", replicas=mesh["replicate"].get_group() if {shards} == 1 else None)
loss_of(model, 0, rank).backward()
print("one step", flush=True)
if rank == 1:
    model.words.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
loss_of(model, 1, rank).backward()
"""
    (code, out, err), dead = ends(dying, ranks)
    assert dead[0] == -9 and "one step" in out
    assert code == 1 and "Error" in err  # not an abort at exit (-6) nor a hang


LEAVING = {
    "close, then destroy": "wire.close(); dist.destroy_process_group()",
    "destroy, then close": "dist.destroy_process_group(); wire.close()",
    "neither": "",
    "an exception": "raise SystemExit(0)",
}


@pytest.mark.parametrize("spec", [pytest.param("fp16", marks=pytest.mark.full), "qsgd"])
@pytest.mark.parametrize("way", LEAVING)
def test_every_way_to_leave_is_clean(way, spec):
    for code, _, err in ends(f"wire = tw.attach(model, {spec!r}); train(model, 3)\n{LEAVING[way]}", 2):
        assert code == 0, err


def test_a_hundred_cycles_leave_no_thread_and_exit_cleanly():
    script = "import json; print(json.dumps(cycles(model, 100)))"
    for code, out, err in ends(script, 2):
        assert code == 0, err
        threads, lanes = json.loads(out)
        assert lanes == []
        assert threads[-1] <= threads[0]


def _in_use():
    exchange = tw.AllReduce()
    with tw.attach(DDP(mlp()), "fp16", exchange=exchange), pytest.raises(ValueError, match="in use"):
        tw.attach(DDP(mlp()), "fp16", exchange=exchange)
    dist.barrier()
    return True


def test_an_exchange_serves_one_wire():
    assert run_world(_in_use, 2) == [True, True]
