"""FSDP2: the scheme between replicas (2 shards x 2 replicas), and a codec between shards."""

import copy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from helpers.sharded import loss_of, meshes, sharded, transformer, whole
from helpers.specs import every_spec
from helpers.world import run_world
from thinwire import units
from thinwire.core.scheme import Codec
from thinwire.schemes import parse

STEPS = 20
FEW = 8


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(ranks, steps=STEPS, *, accumulate=1, extra=lambda step: True):
    """The same training in one process: weights, losses, and the norms of the gradients."""
    model = transformer()
    optimizer, losses, norms = optimizer_of(model), [], []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            losses_now = [loss_of(model, step + 100 * micro, rank, extra=extra(step)) for rank in range(ranks)]
            (sum(losses_now) / ranks).backward()
        losses.append(float(sum(losses_now).detach()) / ranks)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses, norms


def over(shards):
    """A model over so many shards, and what `attach` needs for the rest of the ranks: replicas, or nothing."""
    mesh = meshes(shards)
    model = sharded(mesh["shard"])
    return model, {} if shards == dist.get_world_size() else {"replicas": mesh["replicate"].get_group()}


def train(model, steps, first=0, *, optimizer=None, accumulate=1, extra=lambda step: True):
    optimizer, losses, norms = optimizer or optimizer_of(model), [], []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = loss_of(model, step + 100 * micro, dist.get_rank(), extra=extra(step))
            loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()))
        optimizer.step()
    return losses, norms


def _as_alone(shards, specs, steps, accumulate, extra):
    found = {}
    for spec in specs:
        model, options = over(shards)
        with tw.attach(model, spec, **options) as wire:
            _, norms = train(model, steps, accumulate=accumulate, extra=every if extra else even)
            found[spec] = whole(model), norms, wire.stats()
    return found


def every(step):
    return True


def even(step):
    return step % 2 == 0


@pytest.mark.parametrize("ranks, shards", [(2, 2), (4, 4), (4, 2)])
def test_exact_schemes_train_as_one_process_does(ranks, shards):
    results = run_world(_as_alone, ranks, shards, ["fp32"], STEPS, 1, True)
    weights, _, norms = alone(ranks)
    for found in results:
        mine, my_norms, stats = found["fp32"]
        for name, right in weights.items():
            torch.testing.assert_close(mine[name], right, rtol=1e-4, atol=1e-5)
        assert my_norms == pytest.approx(norms, rel=1e-4)
        assert stats["steps"] == STEPS and stats["bytes_sent"] > 0


@pytest.mark.parametrize("shards", [4, 2])
def test_accumulated_gradients_are_exchanged_once(shards):
    results = run_world(_as_alone, 4, shards, ["fp32"], FEW, 2, True)
    weights, _, _ = alone(4, FEW, accumulate=2)
    for found in results:
        for name, right in weights.items():
            torch.testing.assert_close(found["fp32"][0][name], right, rtol=1e-4, atol=1e-5)
        assert found["fp32"][2]["steps"] == FEW


@pytest.mark.parametrize("shards", [4, 2])
def test_parameters_without_a_gradient_are_left_alone(shards):
    """In every other step a layer is not used: no gradient, so no step of the optimizer's for it."""
    results = run_world(_as_alone, 4, shards, ["fp32"], FEW, 1, False)
    weights, _, _ = alone(4, FEW, extra=even)
    for found in results:
        for name, right in weights.items():
            torch.testing.assert_close(found["fp32"][0][name], right, rtol=1e-4, atol=1e-5)


REPLICAS = [("qsgd(bits=4)", "auto"), ("powersgd(factor_rank=2)", "auto"), ("topk(density=0.1)", "auto")]
SHARDS = [("qsgd(bits=4)", "auto"), ("bf16", "auto"), ("signsgd", True)]
CODECS = [spec for spec in every_spec() if isinstance(codec := parse(spec), Codec) and codec.linear]
LONG = [
    pytest.param(2, [(spec, "auto") for spec in every_spec()], id="all replicas", marks=pytest.mark.full),
    pytest.param(4, [(spec, True) for spec in CODECS], id="all shards", marks=pytest.mark.full),
]


def _lossy(shards, cases):
    found = {}
    for spec, feedback in cases:
        model, options = over(shards)
        optimizer = optimizer_of(model)
        with tw.attach(model, spec, feedback=feedback, **options) as wire:
            losses, _ = train(model, FEW, optimizer=optimizer)
            saved = copy.deepcopy((wire.state_dict(), model.state_dict(), optimizer.state_dict()))
            train(model, 3, FEW, optimizer=optimizer)
            found[spec] = losses, whole(model), wire.stats(), _resumed(shards, spec, feedback, saved)
    return found


def _resumed(shards, spec, feedback, saved):
    model, options = over(shards)
    optimizer = optimizer_of(model)
    model.load_state_dict(saved[1])
    with tw.attach(model, spec, feedback=feedback, **options) as wire:
        wire.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[2])
        train(model, 3, FEW, optimizer=optimizer)
        return whole(model)


@pytest.mark.parametrize(
    "shards, cases", [pytest.param(2, REPLICAS, id="replicas"), pytest.param(4, SHARDS, id="shards"), *LONG]
)
def test_lossy_schemes_learn_and_resume_with_the_same_bits(shards, cases):
    ranks = run_world(_lossy, 4, shards, cases, timeout=600)
    _, right, _ = alone(4, FEW)
    for spec, _ in cases:
        for losses, weights, stats, resumed in (rank[spec] for rank in ranks):
            assert all(torch.equal(weights[name], ranks[0][spec][1][name]) for name in weights), spec
            assert all(torch.equal(resumed[name], weights[name]) for name in weights), spec
            if spec in dict(REPLICAS + SHARDS):  # one bit alone does not get far at this rate
                assert losses[-1] < losses[0] - 0.3 * (right[0] - right[-1]), spec
            if not parse(spec).exact:
                assert stats["bytes_given"] < 0.7 * stats["bytes_dense"], spec


def _remembered(shards, spec, states):
    """What is owed by all of a replica's rows: before, or by one that loaded the states of others."""
    model, options = over(shards)
    with tw.attach(model, spec, feedback=True, **options) as wire:
        if states is None:
            train(model, 3)
        else:
            wire.load_state_dict(tw.checkpoint.merge(states))
        return wire.state_dict()


def owed(states):
    """{parameter: its residuals, rows of all pieces in order, the mean over workers}"""
    merged = tw.checkpoint.merge(states)
    found = {}
    for worker in range(merged["workers"]):
        pieces = {}
        for name, entry in merged[tw.checkpoint.part(worker)].items():
            whole_name, _, rows = name.partition("[")
            pieces.setdefault(whole_name, {})[int(rows.partition(":")[0] or 0)] = entry["residual"]
        for name, by_row in pieces.items():
            joined = torch.cat([by_row[row] for row in sorted(by_row)]) / merged["workers"]
            found[name] = found.get(name, 0) + joined
    return found


@pytest.mark.parametrize("before, after", [((4, 2), (6, 3)), ((4, 4), (3, 3)), ((2, 1), (4, 2))])
def test_another_sharding_takes_what_is_owed_row_by_row(before, after):
    """(ranks, shards): as many replicas or none; between shards the messages are about all rows."""
    saved = run_world(_remembered, before[0], before[1], "qsgd(bits=2)", None)
    loaded = run_world(_remembered, after[0], after[1], "qsgd(bits=2)", saved)
    right, found = owed(saved), owed(loaded)
    assert found.keys() == right.keys() and len(right) > 5
    for name in right:
        assert right[name].abs().max() > 0
        torch.testing.assert_close(found[name], right[name])


def _distributed(shards, folder):
    model, options = over(shards)
    with tw.attach(model, "powersgd(factor_rank=1)" if options else "signsgd", feedback=True, **options) as wire:
        train(model, 2)
        dcp.save({"wire": wire.state_dict()}, checkpoint_id=folder)
        right = {key: tensor.clone() for key, tensor in wire.memory.items()}
        train(model, 1, 2)
        state = {"wire": wire.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        wire.load_state_dict(state["wire"])
        return [torch.equal(tensor, right[key]) for key, tensor in wire.memory.items()]


@pytest.mark.parametrize("shards", [4, 2])
def test_a_distributed_checkpoint_keeps_every_ranks_own(shards, tmp_path):
    for equal in run_world(_distributed, 4, shards, str(tmp_path / "dcp")):
        assert equal and all(equal)


def _mixed(shards, policies):
    found = []
    for policy in policies:
        mesh = meshes(shards)
        model = sharded(mesh["shard"], policy)
        options = {} if shards == 4 else {"replicas": mesh["replicate"].get_group()}
        with tw.attach(model, "qsgd(bits=8)", **options):
            losses, _ = train(model, FEW)
        found.append((losses, whole(model)))
    return found


@pytest.mark.parametrize("shards", [4, 2])
def test_mixed_precision(shards):
    policies = [
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    ]
    ranks = run_world(_mixed, 4, shards, policies)
    weights, losses, _ = alone(4, FEW)
    for number in range(len(policies)):
        for mine, trained in (rank[number] for rank in ranks):
            assert all(torch.equal(trained[name], ranks[0][number][1][name]) for name in trained)
            assert mine[-1] < mine[0] - 0.5 * (losses[0] - losses[-1])
            assert (trained["head.weight"] - weights["head.weight"]).norm() < 0.1 * weights["head.weight"].norm()


def _poisoned(shards):
    model, options = over(shards)
    seen, owed_then = [], []
    with tw.attach(model, "qsgd(bits=4)", feedback=True, **options) as wire:
        for step in range(4):
            model.zero_grad()
            loss = loss_of(model, step, dist.get_rank())
            (loss * torch.nan if step == 1 and dist.get_rank() == 3 else loss).backward()
            seen.append(all(bool(p.grad.full_tensor().isfinite().all()) for p in model.parameters()))
            owed_then.append({key: tensor.clone() for key, tensor in wire.memory.items()})
    return seen, owed_then


@pytest.mark.parametrize("shards", [4, 2])
def test_nan_reaches_all_and_stays_nowhere(shards):
    """Between replicas all hear of it and owe what they owed; between shards only who sent it does."""
    for rank, (seen, owed_then) in enumerate(run_world(_poisoned, 4, shards)):
        assert seen == [True, False, True, True]
        assert owed_then[0] and all(bool(tensor.isfinite().all()) for each in owed_then for tensor in each.values())
        if shards == 2 or rank == 3:
            assert all(torch.equal(owed_then[1][key], owed_then[0][key]) for key in owed_then[0])


def _closed():
    model, options = over(2)
    optimizer = optimizer_of(model)
    with tw.attach(model, "qsgd(bits=4)", **options):
        train(model, 2, optimizer=optimizer)
    train(model, 3, 2, optimizer=optimizer)
    between = whole(model)
    with tw.attach(model, "fp32", **options):
        train(model, 1, 5, optimizer=optimizer)
    return between, whole(model)


def test_after_close_replicas_are_averaged_plainly():
    ranks = run_world(_closed, 4)
    for between, after in ranks:
        assert all(torch.equal(between[name], ranks[0][0][name]) for name in between)
        assert all(torch.equal(after[name], ranks[0][1][name]) for name in after)


def _refused():
    mesh = meshes(1)
    told = []

    def refuse(model, scheme="qsgd", **options):
        with pytest.raises(ValueError) as error:
            tw.attach(model, scheme, **options)
        told.append(str(error.value))

    refuse(sharded(mesh))
    refuse(nn.Linear(3, 3))
    refuse(DistributedDataParallel(nn.Linear(3, 3)), replicas=dist.group.WORLD)
    offloaded = fully_shard(transformer(), mesh=meshes(2)["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    refuse(offloaded)
    model, _ = over(2)
    refuse(model, "powersgd")
    refuse(model, "signsgd")
    refuse(model, controller="uniform")
    refuse(model, exchange=tw.AllReduce(route="two-shot"))
    refuse(model, "topk(mean='senders')", feedback=True)
    with tw.attach(model, "qsgd") as wire:
        refuse(model)
        with pytest.raises(ValueError, match="loss scale is not supported under FSDP2"):
            wire.scale(2.0)
    return told


def test_nobody_else_pays_for_importing_it():
    code = "import sys, thinwire; print(*{'torch.distributed.fsdp', 'thinwire.units'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == ""


def test_the_versions_that_were_seen_and_another_with_other_names():
    assert ".".join(torch.__version__.split(".")[:2]) in units.SEEN, "these tests are what seeing is: add it"
    group = SimpleNamespace(**dict.fromkeys(units.PRIVATE[1:]))
    with pytest.raises(ValueError, match=f"PyTorch 2.13; this is {torch.__version__[:4]}.* has no fsdp_params$"):
        units.check_names(group, units.PRIVATE)


def test_what_cannot_be_done_is_refused_with_what_can():
    for told in run_world(_refused, 2):
        assert 'mesh=mesh["shard"]' in told[0] and 'replicas=mesh["replicate"].get_group()' in told[0]
        assert "or one that fully_shard() sharded, got Linear" in told[1]
        assert "DistributedDataParallel knows its own group" in told[2]
        assert "CPU offload is not supported" in told[3]
        assert "not one message" in told[4]
        assert "needs feedback=True" in told[5]
        assert "no controller=" in told[6]
        assert "exchange must be AllReduce() or None" in told[7]
        assert "needs all of them at once" in told[8]
        assert "attached already" in told[9]
