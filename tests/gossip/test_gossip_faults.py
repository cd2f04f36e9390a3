"""kill -9 of one of several plainly launched processes: the others go on, or raise, as the user chose."""

import itertools
import json
import signal
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers import faults, survivor
from helpers.plain import die, run_plain
from helpers.ranks import launch, outcome
from thinwire.gossip import Gossip, GossipSimulation, graphs

DEATH, STEPS = 10, 60


def task(graph, mixer, victims, on_failure="continue"):
    return {
        "graph_name": graph, "mixer": mixer, "victims": victims,
        "death": DEATH, "steps": STEPS, "on_failure": on_failure,
    }  # fmt: skip


def run(ranks, what):
    """What every surviving rank saw, by rank. Nobody restarts the group, or ends it."""
    ends = run_plain(partial(survivor.main, **what), ranks)
    for rank, end in enumerate(ends):
        assert end.code == (-signal.SIGKILL if rank in what["victims"] else 0), end.error
    return {rank: end.value for rank, end in enumerate(ends) if rank not in what["victims"]}


def check_they_went_on(seen, victim):
    assert len(seen) == 4
    for result in seen.values():
        assert result["error"] is None
        assert result["lost"] == [victim], "the news reached everybody, neighbours of the dead or not"
        assert len(result["losses"]) == STEPS
        assert result["losses"][-1] < 0.7 * result["losses"][DEATH], "the loss keeps falling"
        assert any(f"rank {victim} lost" in warning for warning in result["warnings"])
        assert 0 < result["distance"] < 5
    assert len({result["checksum"] for result in seen.values()}) == 1, "survivors average among themselves"


def test_plain_processes_go_on_after_kill_9_and_the_loss_keeps_falling():
    processes = launch(
        "from helpers.survivor import script; script()", 5, json.dumps(task("chorded", "powergossip", [3]))
    )
    ends = [outcome(process, timeout=150) for process in processes]
    for rank, (code, _, err) in enumerate(ends):
        assert code == (-signal.SIGKILL if rank == 3 else 0), err
    seen = {rank: json.loads(out) for rank, (_, out, _) in enumerate(ends) if rank != 3}
    check_they_went_on(seen, 3)


def test_survivors_give_the_lost_edges_weight_to_themselves():
    """As on a graph that is a function of the step and has no edges to the dead from its death on."""
    seen = run(5, task("chorded", "dpsgd", [3]))
    whole = survivor.chorded_ring(5)
    learners = [survivor.learner() for _ in range(5)]
    generators = [torch.Generator().manual_seed(rank) for rank in range(5)]
    models = [model for model, _ in learners]
    gossip = GossipSimulation(models, lambda step: whole if step < DEATH else whole.without([3]), "dpsgd", equal=True)
    for _ in range(STEPS):
        for (model, optimizer), generator in zip(learners, generators, strict=True):
            optimizer.zero_grad()
            survivor.error_of(model, torch.randn(64, 10, generator=generator)).backward()
        gossip.mix()
        for _, optimizer in learners:
            optimizer.step()
    for rank, result in seen.items():
        assert result["weights"] == pytest.approx(survivor.flat(learners[rank][0]), abs=1e-5)


def test_the_death_of_the_rank_that_hosts_the_rendezvous_does_not_matter():
    check_they_went_on(run(5, task("chorded", "choco(codec='qsgd(bits=6)', step=0.4)", [0])), 0)


def test_a_graph_that_falls_apart_raises_everywhere():
    """Ring of 6, ranks 1 and 4 die: no survivor can reach all others, though each still has a neighbour."""
    for result in run(6, task("ring", "dpsgd", [1, 4])).values():
        assert "DeadRank" in result["error"]
        assert len(result["losses"]) < STEPS


def test_raise_when_asked_to():
    for result in run(3, task("ring", "powergossip", [2], on_failure="stop")).values():
        assert f"DeadRank: rank 2 lost in step {DEATH}" in result["error"]
        assert len(result["losses"]) == DEATH


def averages_with_deaths(moments):
    """What this rank saw of `len(moments)` averages: (their value, who was dead then)."""
    rank, seen = dist.get_rank(), []
    model = nn.Linear(1, 1, bias=False)
    gossip = Gossip(model, graphs.complete(dist.get_world_size()), "dpsgd", timeout_seconds=30)
    nn.init.constant_(model.weight, rank)
    for victim, sends, amid in moments:
        if rank == victim:
            die_at_send(sends, amid)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with gossip.average():
                seen.append((model.weight.item(), gossip.dead))
    gossip.consensus()
    seen.append(gossip.dead)
    gossip.close()
    return seen


def die_at_send(number, amid):
    """Let `number` more messages arrive, and die instead of the next, which is of the same round or not."""
    send, works = dist.isend, []

    def counted(*args, **options):
        if len(works) == number:
            if amid:
                works[-1].wait()
            die()
        works.append(send(*args, **options))
        return works[-1]

    dist.isend = counted


def test_averaging_survives_a_death_between_two_sends():
    """Of the news (4 sends), of the tree after news and a vote (3 x 3), of the last vote after all that (7 and 1)."""
    moments = [(4, 1, True), (3, 9, False), (2, 8, True)]
    ends = run_plain(averages_with_deaths, 5, moments)
    assert [end.code for end in ends] == [0, 0, *[-signal.SIGKILL] * 3], ends[0].error
    assert ends[0].value == ends[1].value, "to the bit, and of one mind"
    (first, dead), (second, also_dead), (third, _), at_last = ends[0].value
    assert (first, dead) == (1.5, [4]) and (second, also_dead) == (1.0, [3, 4])
    assert third in (0.5, 1.0), "with rank 2, whose value had arrived, or without"
    assert at_last == [2, 3, 4]


def train_on_a_cut_ring(mixer):
    """Of a ring of 4, the connection of ranks 0 and 1 breaks at step 3."""
    rank = dist.get_rank()
    before = faults.connections()
    model, optimizer = survivor.learner()
    gossip = Gossip(model, graphs.ring(4), mixer, timeout_seconds=30)
    own = {names: fd for names, fd in faults.connections().items() if names not in before}
    everyone = [None] * 4
    dist.all_gather_object(everyone, list(own))
    generator, messages = torch.Generator().manual_seed(rank), []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(20):
            if step == 3 and rank == 0:
                [descriptor] = [fd for (ours, theirs), fd in own.items() if (theirs, ours) in everyone[1]]
                faults.cut(descriptor)
            optimizer.zero_grad()
            survivor.error_of(model, torch.randn(64, 10, generator=generator)).backward()
            gossip.mix()
            optimizer.step()
            messages.append(gossip.stats()["messages"])
        distance = gossip.consensus()
        with gossip.average():
            weights = survivor.flat(model)
    seen = {"dead": gossip.dead, "distance": distance, "weights": weights, "warnings": [str(w.message) for w in heard]}
    gossip.close()
    return seen | {"messages": [after - before for before, after in itertools.pairwise(messages)]}


def test_a_broken_connection_between_two_that_live_costs_an_edge_and_no_rank():
    ends = run_plain(train_on_a_cut_ring, 4, "dpsgd")
    assert [end.code for end in ends] == [0] * 4, ends[0].error
    seen = [end.value for end in ends]
    for rank, result in enumerate(seen):
        assert result["dead"] == []
        assert result["weights"] == seen[0]["weights"], "the mean is of all four, round the broken connection"
        assert 0 < result["distance"] < 1
        assert result["messages"][-1] == (1 if rank in (0, 1) else 2), "the other edges are in use"
        assert len(result["warnings"]) == (rank in (0, 1))
    assert "the connection to rank 1 broke in step 3" in seen[0]["warnings"][0]
