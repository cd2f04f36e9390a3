"""One state for all ranks, `state_dict(gather=...)`, for checkpoints that are one file."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.exchanges import ROWS, SHAPES, inputs
from helpers.models import batch, digest, mlp
from helpers.sharded import loss_of as sharded_loss
from helpers.sharded import meshes, sharded, whole
from helpers.training import assert_equal, loss_of
from helpers.world import run_world
from thinwire.exchange import objects
from thinwire.reducer import Reducer

OPTIONS = {"feedback": True, "controller": "normrule(interval=3)"}
SPEC = "qsgd(bits=4)"


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def start():
    model = DDP(mlp())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), tw.attach(model, SPEC, **OPTIONS)


def run(model, optimizer, wire, steps):
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        wire.observe(loss)
        optimizer.step()


def _one_file_for_all(folder):
    """Save at step 4; what the first rank wrote is all that anybody resumes from."""
    model, optimizer, wire = start()
    run(model, optimizer, wire, range(4))
    everywhere = wire.state_dict(gather=True)
    first = wire.state_dict(gather="first")
    assert {"worker0000", "worker0001"} <= set(everywhere)
    assert ("worker0001" in first) and ("worker0000" in first) == (dist.get_rank() == 0)
    own, stats = copy.deepcopy(wire.state_dict()), wire.stats()
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "wire": first}
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/one.pt")
    run(model, optimizer, wire, range(4, 9))
    wire.close()

    state = torch.load(f"{folder}/one.pt", weights_only=True)
    again, other, resumed = start()
    again.module.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["wire"])
    assert resumed.stats()["bytes_sent"] == stats["bytes_sent"]
    assert resumed.steering.state_dict()["observed"] == own["steering"]["observed"]
    mine = f"worker{dist.get_rank():04d}"
    for name, entry in own[mine].items():
        assert torch.equal(resumed.memory[name, "residual"], entry["residual"])
        assert not torch.equal(*(everywhere[f"worker{i:04d}"][name]["residual"] for i in (0, 1)))
    run(again, other, resumed, range(4, 9))
    assert resumed.level == wire.level
    resumed.load_state_dict(through_a_file(everywhere))
    resumed.close()
    assert_equal(digest(model), digest(again))
    with pytest.raises(ValueError, match="gather must be"):
        resumed.state_dict(gather="all")
    with pytest.raises(ValueError, match="give one of them"):
        resumed.state_dict(gather=True, workers=3)
    return everywhere


def _elsewhere(state):
    model, optimizer, wire = start()
    wire.load_state_dict(state)
    owed = {name: tensor.clone() for (name, key), tensor in wire.memory.items() if key == "residual"}
    run(model, optimizer, wire, range(4, 6))
    wire.close()
    return owed


def test_one_file_gives_every_rank_its_own_and_another_number_what_is_owed(tmp_path):
    states = run_world(_one_file_for_all, 2, str(tmp_path))
    results = run_world(_elsewhere, 3, states[1])
    for name in results[0]:
        before = sum(states[0][f"worker{i:04d}"][name]["residual"] for i in range(2)) / 2
        torch.testing.assert_close(sum(owed[name] for owed in results) / 3, before)


def _local(options):
    def begun():
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return net, optimizer, tw.LocalSteps(net, optimizer, **options)

    def train(net, optimizer, first, count):
        for step in range(first, first + count):
            x, y = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

    net, optimizer, local = begun()
    more = 2 * dist.get_rank() if local.weighted else 0  # this worker makes more steps in a round
    train(net, optimizer, 0, 5 + more)
    state = through_a_file(local.state_dict(gather=True))
    states = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    for each in (0, 1):
        train(net, optimizer, 7 + 9 * each, 2)
        local.sync()
    again, other, resumed = begun()
    again.load_state_dict(states[0])
    other.load_state_dict(states[1])
    resumed.load_state_dict(state)
    assert resumed.stats()["steps"] == 5 + more
    for each in (0, 1):
        train(again, other, 7 + 9 * each, 2)
        resumed.sync()
    assert_equal(digest(net), digest(again))
    for key, tensor in local.memory.items():
        assert torch.equal(tensor, resumed.memory[key]), key
    for each in (local, resumed):
        each.close()


@pytest.mark.parametrize(
    "options",
    [
        {"every": 4, "scheme": "topk(density=0.1)", "outer": "sgd(lr=1)", "decay": 0.95},
        {"every": 100, "scheme": "signsgd", "weighted": True, "outer": "average"},
    ],
    ids=["in a round", "unequal steps"],
)
def test_local_steps_are_one_state_too(options):
    run_world(_local, 2, options)


def _replicas():
    mesh = meshes(2)
    group = mesh["replicate"].get_group()

    def begun():
        model = sharded(mesh["shard"])
        wire = tw.attach(model, "topk(density=0.1)", replicas=group)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), wire

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            sharded_loss(model, step, dist.get_rank()).backward()
            optimizer.step()

    model, optimizer, wire = begun()
    train(model, optimizer, range(3))
    state = through_a_file(wire.state_dict(gather=True))
    kept = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3, 6))
    again, other, resumed = begun()
    again.load_state_dict(kept)
    resumed.load_state_dict(state)
    train(again, other, range(3, 6))
    for name, right in whole(model).items():
        assert torch.equal(whole(again)[name], right), name
    wire.close()
    resumed.close()
    return state


def test_sharded_replicas_are_one_state_that_any_sharding_takes():
    states = run_world(_replicas, 4)
    assert sorted(states[3]["apart"]) == ["worker0000.0", "worker0000.1", "worker0001.0", "worker0001.1"]
    run_world(_on_two_shards, 2, states[0])


def _on_two_shards(state):
    """One replica: it takes what both owed."""
    mesh = meshes(2)
    wire = tw.attach(sharded(mesh["shard"]), "topk(density=0.1)", replicas=mesh["replicate"].get_group())
    wire.load_state_dict(state)
    for (name, key), tensor in wire.memory.items():
        owed = sum(state[f"worker{i:04d}"][name][key] for i in (0, 1)) / 2
        torch.testing.assert_close(tensor, owed)
    wire.close()


def _reducer(exchange, group):
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    return Reducer(tensors, "qsgd(bits=4)", group, exchange=exchange, feedback=True, exempt=("exact",))


def _begin(exchange, group):
    """(what comes after the save, what was saved)"""
    with _reducer(exchange, group) as reducer:
        for step in range(2):
            reducer.reduce(inputs(step, exchange.worker))
        state = through_a_file(reducer.state_dict(gather=True))
        return [reducer.reduce(inputs(step, exchange.worker)) for step in range(2, 4)], state


def _go_on(exchange, group, state):
    with _reducer(exchange, group) as reducer:
        reducer.load_state_dict(state)
        return [reducer.reduce(inputs(step, exchange.worker)) for step in range(2, 4)]


def _over(row):
    found = row.session(_begin)
    after, state = found if isinstance(found, tuple) else (None, {})  # a server has no say in it
    again = row.session(_go_on, state)
    if after is not None:
        for step, mean in enumerate(after):
            assert_equal(list(mean.values()), list(again[step].values()))
        assert len([key for key in state if key.startswith("worker0")]) == row.senders


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in ("server", "2x2")], ids=lambda row: row.name)
def test_every_exchange_gathers(row):
    row.run(_over)


def _gathered_in_chunks():
    objects.CHUNK_BYTES = 1000
    rank, group = dist.get_rank(), dist.group.WORLD
    state = {"rank": rank, "t": torch.arange(100 + 500 * rank), "deep": [(1, None, {2: 0.5})]}
    for to_all in (True, False):
        found = objects.gather_states(state, group, to_all=to_all)
        assert [each["rank"] for each in found] == ([0, 1, 2] if to_all or rank == 0 else [rank])
        for each in found:
            assert torch.equal(each["t"], torch.arange(100 + 500 * each["rank"])) and each["deep"] == state["deep"]


def test_states_of_any_sizes_are_gathered_in_chunks():
    run_world(_gathered_in_chunks, 3)
