"""Gossip on real processes: the virtual run to the bit, bytes, averaging, state, and mistakes by name."""

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.models import batch, mlp
from helpers.world import run_world
from thinwire.gossip import Gossip, GossipSimulation, graphs

STEPS = 6
EXACT = ["dpsgd", "powergossip(iterations=2)", "powergossip(factor_rank=3)"]


def train_and_mix(model, rank, steps, mix, overlapped=False, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        x, y = batch(rank, step, dtype)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        if overlapped:
            mix[0]()
            loss.backward()
            mix[1]()
        else:
            loss.backward()
            mix()
        optimizer.step()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def real_run(spec, overlapped):
    rank = dist.get_rank()
    model = mlp(seed=rank, dtype=torch.float64)  # started differently: rank 0's weights must win
    with Gossip(model, graphs.ring(4), spec, seed=7) as gossip:
        mix = (gossip.mix_begin, gossip.mix_end) if overlapped else gossip.mix
        train_and_mix(model, rank, STEPS, mix, overlapped)
        stats = gossip.stats()
        return weights(model), stats, gossip.consensus()


def virtual_run(spec, workers=4, graph=None):
    models = [mlp(seed=0, dtype=torch.float64) for _ in range(workers)]
    gossip = GossipSimulation(models, graph or graphs.ring(workers), spec, seed=7, equal=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            x, y = batch(rank, step, torch.float64)
            optimizers[rank].zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
        gossip.mix()
        for optimizer in optimizers:
            optimizer.step()
    return models, gossip


@pytest.mark.parametrize("spec", EXACT)
def test_real_processes_equal_the_virtual_run_and_count_the_same_bytes(spec):
    real = run_world(real_run, 4, spec, False)
    models, virtual = virtual_run(spec)
    for (found, _, consensus), model in zip(real, models, strict=True):
        assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
        assert consensus == pytest.approx(virtual.consensus(), rel=1e-9)
    news = 2  # bytes per message: one bit for each pair of 4 ranks
    sent = sum(stats["bytes_sent"] - news * stats["messages"] for _, stats, _ in real)
    assert sent == virtual.bytes_sent
    assert sum(stats["messages"] for _, stats, _ in real) == virtual.messages_sent

    shapes = [tuple(p.shape) for p in models[0].parameters()]
    dense = 8 * sum(p.numel() for p in models[0].parameters())
    vectors = 8 * sum(s[0] for s in shapes if len(s) == 1)
    rows, columns = (8 * sum(s[side] for s in shapes if len(s) == 2) for side in (0, 1))
    mixes = STEPS - 1  # the first one finds equal replicas and sends nothing
    per_neighbour = {
        "dpsgd": mixes * dense,
        "powergossip(iterations=2)": mixes * (vectors + rows + columns),
        "powergossip(factor_rank=3)": mixes * vectors + 3 * (3 * rows + 2 * columns),
    }[spec]
    for _, stats, _ in real:
        assert stats["messages"] == 2 * mixes * (2 if "iterations" in spec else 1), "one per neighbour and round"
        assert stats["bytes_sent"] == 2 * per_neighbour + news * stats["messages"]
        assert stats["bytes_dense"] == 2 * mixes * dense


def test_mixing_behind_backward_gives_the_same_bits():
    spec = "powergossip(iterations=2)"
    models, _ = virtual_run(spec)
    for (found, *_), model in zip(run_world(real_run, 4, spec, True), models, strict=True):
        assert all(torch.equal(found[name], p) for name, p in model.named_parameters())


def averaging():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with Gossip(model, graphs.star(3)) as gossip:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
        model[1].running_mean.fill_(rank)
        model[1].num_batches_tracked.fill_(rank)
        own = weights(model)
        distance = gossip.consensus()
        with gossip.average():
            mean = weights(model)
            buffers = (float(model[1].running_mean[0]), int(model[1].num_batches_tracked))
        assert all(torch.equal(own[name], p) for name, p in model.named_parameters())
        assert float(model[1].running_mean[0]) == rank
        gossip.average()
        assert gossip.consensus() == 0
        return own, mean, buffers, distance


def test_average_and_back_and_consensus():
    results = run_world(averaging, 3)
    count = sum(p.numel() for p in results[0][0].values())
    for rank, (_, mean, buffers, distance) in enumerate(results):
        assert all(torch.equal(mean[name], results[0][1][name]) for name in mean), "the same bits on all ranks"
        assert all(torch.allclose(mean[name], results[1][0][name]) for name in mean), "rank 1 is the mean of 0, 1, 2"
        assert buffers == (1.0, rank)
        assert distance == pytest.approx((2 / 3 * count) ** 0.5)


def resumed(spec, folder):
    rank = dist.get_rank()
    model = mlp(seed=0)
    with Gossip(model, graphs.ring(3), spec) as gossip:
        train_and_mix(model, rank, 3, gossip.mix)
        torch.save({"model": model.state_dict(), "gossip": gossip.state_dict()}, f"{folder}/{rank}.pt")
        train_and_mix(model, rank, 3, gossip.mix, first=3)
    again = mlp(seed=9)
    with Gossip(again, graphs.ring(3), spec) as gossip:
        saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
        again.load_state_dict(saved["model"])
        gossip.load_state_dict(saved["gossip"])
        sent = gossip.stats()["bytes_sent"]
        train_and_mix(again, rank, 3, gossip.mix, first=3)
        with pytest.raises(ValueError, match="this is rank"):
            gossip.load_state_dict(saved["gossip"] | {"rank": 99})
        with pytest.raises(ValueError, match="format"):
            gossip.load_state_dict({})
    return weights(model), weights(again), sent


@pytest.mark.parametrize("spec", ["powergossip", "choco(codec='qsgd(bits=6)', step=0.5)"])
def test_a_resumed_run_continues_with_the_same_bits(spec, tmp_path):
    for whole, again, sent in run_world(resumed, 3, spec, str(tmp_path)):
        assert all(torch.equal(whole[name], again[name]) for name in whole)
        assert sent > 0


def pairs(step):  # a matching: no step is connected, two steps together are
    weights = torch.eye(4).numpy() / 2
    for a, b in [(0, 1), (2, 3)] if step % 2 else [(1, 2), (3, 0)]:
        weights[a, b] = weights[b, a] = 0.5
    return weights


def varying():
    rank = dist.get_rank()
    model = mlp(seed=0, dtype=torch.float64)
    with Gossip(model, pairs, "powergossip", seed=7) as gossip:
        train_and_mix(model, rank, STEPS, gossip.mix)
        return weights(model)


def test_a_graph_that_is_a_function_of_the_step():
    models, _ = virtual_run("powergossip", graph=pairs)
    for found, model in zip(run_world(varying, 4), models, strict=True):
        assert all(torch.equal(found[name], p) for name, p in model.named_parameters())


def mismatched():
    wrong = {
        "graph": nx.star_graph(2), "mixer": "powergossip", "seed": 1, "model": nn.Linear(2, 2), "on_failure": "stop",
    }  # fmt: skip
    for what, other in wrong.items():
        arguments = {"model": mlp(), "graph": graphs.ring(3), "mixer": "dpsgd", "seed": 0, "on_failure": "continue"}
        if dist.get_rank() == 1:
            arguments[what] = other
        with pytest.raises(ValueError, match=rf"{what} differs between ranks: ranks \[0, 2\] .* against ranks \[1\] "):
            Gossip(**arguments)


def test_ranks_that_were_given_different_things_are_named():
    run_world(mismatched, 3)


def mismatched_in_one_step():
    def graph_of(step):
        return graphs.star(3) if step == 5 and dist.get_rank() == 2 else graphs.ring(3)

    with pytest.raises(ValueError, match=r"graph differs between ranks: ranks \[0, 1\] .* against ranks \[2\] "):
        Gossip(mlp(), graph_of, "dpsgd")


def test_a_graph_of_the_step_that_differs_in_one_of_the_first_steps_is_named():
    run_world(mismatched_in_one_step, 3)


def refused():
    ours, theirs = graphs.ring(3), [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.1, 0.5, 0.4]]
    first = dist.get_rank() == 0
    with pytest.raises(ValueError, match="symmetric" if first else r"ranks \[0\] refused"):
        Gossip(mlp(), theirs if first else ours)


def test_a_rank_that_refuses_its_arguments_does_not_leave_the_others_waiting():
    run_world(refused, 3)


def misused():
    model = mlp()
    with pytest.raises(ValueError, match="does not fit 2 replicas"):
        Gossip(model, graphs.ring(5))
    with pytest.raises(ValueError, match="on_failure must be"):
        Gossip(model, graphs.ring(2), on_failure="ignore")
    with pytest.raises(ValueError, match="timeout_seconds"):
        Gossip(model, graphs.ring(2), timeout_seconds=0)
    gossip = Gossip(model, graphs.ring(2))
    with pytest.raises(RuntimeError, match="without mix_begin"):
        gossip.mix_end()
    gossip.mix_begin()
    with pytest.raises(RuntimeError, match="before mix_end"):
        gossip.mix()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="step the optimizer after it"):
        gossip.mix_end()
    gossip.close()
    gossip.close()
    with pytest.raises(RuntimeError, match="closed"):
        gossip.mix()


def test_misuse_is_named():
    run_world(misused, 2)


def test_gossip_needs_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        Gossip(mlp(), graphs.ring(2))


def out_of_step():
    gossip = Gossip(mlp(), graphs.ring(2), "dpsgd", timeout_seconds=5)
    gossip.mix()
    gossip.mix()
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match="rank 1 said nothing"):
            gossip.mix()


def test_a_neighbour_that_does_not_speak_is_a_time_out():
    run_world(out_of_step, 2)


def subgroup():
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = mlp(seed=rank)
    with Gossip(model, graphs.ring(2), "dpsgd", group=pair) as gossip:
        train_and_mix(model, rank, 2, gossip.mix)
        with gossip.average():
            return weights(model)


def test_gossip_in_a_subgroup():
    _, a, b = run_world(subgroup, 3)
    assert all(torch.equal(a[name], b[name]) for name in a)
