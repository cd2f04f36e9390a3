"""Checkpoints of LocalSteps: within a round and within a flight, at another number of workers, in one file or many."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import thinwire as tw
from helpers.models import batch, digest, mlp
from helpers.training import assert_equal, assert_replicas_equal
from helpers.world import run_world

CASES = [
    {"every": 4, "scheme": "fp32"},
    {"every": 4, "scheme": "topk(density=0.1)", "decay": 0.95, "outer": "sgd(lr=1)"},
    {"every": 6, "scheme": "qsgd(bits=2)", "feedback": True, "residual": "bf16", "parts": 2, "delay": 2, "mix": 0.5},
    {"every": 4, "scheme": "powersgd", "parts": 3, "outer": "average"},
]


def train(net, optimizer, first, count):
    for step in range(first, first + count):
        x, y = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


def begun(options):
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, tw.LocalSteps(net, optimizer, **options)


def saved(*things):
    """Through a file, with nothing but tensors and plain values."""
    file = io.BytesIO()
    torch.save([copy.deepcopy(thing.state_dict()) for thing in things], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _resumed(options, at):
    net, optimizer, local = begun(options)
    train(net, optimizer, 0, at)
    states = saved(net, optimizer, local)
    train(net, optimizer, at, 9)
    local.close()

    again, other, resumed = begun(options)
    for thing, state in zip((again, other, resumed), states, strict=True):
        thing.load_state_dict(state)
    train(again, other, at, 9)
    resumed.close()
    assert_equal(digest(net), digest(again))
    for key, tensor in local.memory.items():
        assert torch.equal(tensor, resumed.memory[key]), key
    assert resumed.stats()["rounds"] == local.stats()["rounds"]


@pytest.mark.parametrize("options", CASES, ids=lambda options: options["scheme"])
def test_a_run_resumed_within_a_round_goes_on_with_the_same_bits(options):
    run_world(_resume_at_every_step, 2, options)


def _resume_at_every_step(options):
    for at in range(3, 8):
        _resumed(options, at)


def _save(options):
    net, optimizer, local = begun(options)
    train(net, optimizer, 0, 6)
    state = saved(local)[0]
    local.close()
    return state


def _load(states, options):
    net, optimizer, local = begun(options)
    with pytest.raises(ValueError, match=r"merge\(states\)"):
        local.load_state_dict(states[0])
    merged = tw.checkpoint.merge(states)
    local.load_state_dict(merged)
    for name, p in net.named_parameters():
        assert torch.equal(p, local.anchor.weights[name])
    owed = {key: tensor.clone() for key, tensor in local.memory.items()}
    train(net, optimizer, 6, options["every"])
    local.close()
    return owed, digest(net)


@pytest.mark.parametrize("workers", [1, 3])
def test_at_another_number_of_workers_all_begin_at_the_anchor_and_owe_the_same(workers):
    options = CASES[1]
    states = run_world(_save, 2, options)
    results = run_world(_load, workers, states, options)
    assert_replicas_equal([weights for _, weights in results])
    for name, key in results[0][0]:
        before = sum(state[f"worker{i:04d}"][name][key] for i, state in enumerate(states)) / 2
        after = sum(owed[name, key] for owed, _ in results) / workers
        torch.testing.assert_close(after, before)


def _distributed(options, folder):
    net, optimizer, local = begun(options)
    train(net, optimizer, 0, 5)
    own = f"rank{dist.get_rank()}"
    states = {"local": local.state_dict(), own: {"net": net.state_dict(), "optimizer": optimizer.state_dict()}}
    dcp.save(states, checkpoint_id=folder)
    train(net, optimizer, 5, 8)
    local.close()

    again, other, resumed = begun(options)
    train(again, other, 0, 1)  # gives the inner optimizer a state for the loader to fill
    states = {"local": resumed.state_dict(), own: {"net": again.state_dict(), "optimizer": other.state_dict()}}
    dcp.load(states, checkpoint_id=folder)
    again.load_state_dict(states[own]["net"])
    other.load_state_dict(states[own]["optimizer"])
    resumed.load_state_dict(states["local"])
    train(again, other, 5, 8)
    resumed.close()
    assert_equal(digest(net), digest(again))


@pytest.mark.parametrize("options", CASES[1:3], ids=lambda options: options["scheme"])
@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_keeps_every_workers_part(options, tmp_path):
    run_world(_distributed, 2, options, str(tmp_path))


def _strange():
    _, _, local = begun(CASES[0])
    before = copy.deepcopy(local.state_dict())
    for change, message in [
        (lambda state: state.pop("local"), "no part 'local'"),
        (lambda state: state.update(local=[]), "'local' cannot be list"),
        (lambda state: state["local"].pop("attempts"), "has no int 'attempts'"),
        (lambda state: state["local"].update(made=[1, 2]), "is of 2 parts, here are 1"),
        (lambda state: state["local"]["anchor"].update({"0.weight": 3}), "lacks dense tensors"),
        (lambda state: state["local"].pop("anchor"), "lacks anchor"),
        (lambda state: state["local"]["anchor"].pop("0.weight"), r"\['0\.weight'\] \(1 in all\)"),
        (lambda state: state["local"]["outer"].update(strange={}), "outer optimizer does not fit: .'strange'"),
    ]:
        state = copy.deepcopy(before)
        change(state)
        with pytest.raises(ValueError, match=message):
            local.load_state_dict(state)
    assert_equal(list(local.state_dict()["local"]["anchor"].values()), list(before["local"]["anchor"].values()))
    local.close()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    run_world(_strange, 1)
