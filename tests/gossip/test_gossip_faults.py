"""kill -9 of one of several plainly launched processes: the others go on, or raise, as the user chose."""

import json
import signal
from functools import partial

import pytest
import torch

from helpers import survivor
from helpers.plain import run_plain
from helpers.ranks import launch, outcome
from thinwire.gossip import GossipSimulation

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
