"""`thinwire repro powergossip`: its quick claims hold, and its training trains and counts."""

from types import SimpleNamespace

import pytest

from thinwire.gossip import graphs
from thinwire.lab.repro import powergossip
from thinwire.lab.repro._gossip_training import GossipRun, Training
from thinwire.lab.tasks import datasets


def test_consensus_bytes_and_graphs_are_as_in_the_reruns():
    claims = []
    powergossip._consensus_table(powergossip.MARKS[:2], claims, lambda text: None)
    powergossip._bytes_table(claims)
    powergossip._graph_table(claims, lambda text: None)
    assert len(claims) == 3 * 2 + 3 + 3
    assert [claim for claim in claims if not claim.holds] == []


@pytest.mark.parametrize("mixer", [None, "dpsgd", "powergossip", "choco(codec='topk(density=0.01)', step=0.1)"])
@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_training_learns(mixer, skew):
    training = Training(datasets.embedded_images(), graphs.ring(4), steps=40, skew=skew)
    outcome = training.run(mixer, seed=0)
    assert outcome.accuracy > 40
    if mixer == "dpsgd":
        weights = 8 * 25 + 8 + 16 * 72 + 16 + 32 * 784 + 32 + 10 * 32 + 10
        assert outcome.bytes_per_step == 2 * 4 * weights * 39 / 40  # the first mix finds equal replicas


def test_a_run_that_diverges_ends_early_and_says_so():
    training = Training(datasets.embedded_images(), graphs.ring(4), steps=100_000)
    outcome = training.run("deepsqueeze(codec='signsgd', step=1.9)", seed=0)
    assert outcome.diverged
    assert outcome.accuracy == 10


def made_up(mixer, seed):
    """Accuracies by rule: peers are best at step 0.25, except that CHOCO with top 1% diverges above 0.1."""
    step = float(mixer.split("step=")[1].rstrip(")")) if mixer and "step=" in mixer else None
    if mixer and "topk" in mixer and step > 0.1:
        return GossipRun(10.0, 1.0, 1.0, diverged=True)
    if mixer and "powergossip" in mixer:
        return GossipRun(84.5 if "iterations" in mixer else 83.5, 1.0, 1.0)
    return GossipRun(85.0 if step is None else 85.0 - 20 * abs(step - 0.25), 1.0, 1.0)


def test_every_peer_is_tuned_and_compared():
    training = SimpleNamespace(graph=graphs.ring(8), steps=900, skew=0.5, run=made_up)
    claims = []
    trained, tuning = powergossip._training_tables(training, 2, powergossip.GRID, claims, lambda text: None)
    rows = {row[0]: row[1:] for row in trained.rows}
    assert list(rows) == [
        "all-reduce",
        "D-PSGD",
        "PowerGossip, rank 1",
        "PowerGossip, rank 1, 2 iterations",
        "CHOCO, sign, untuned (step 1.308)",
        "CHOCO, sign, tuned (step 0.25)",
        "CHOCO, top 1%, untuned (step 1.308)",
        "CHOCO, top 1%, tuned (step 0.1)",
        "DeepSqueeze, sign, untuned (step 1.308)",
        "DeepSqueeze, sign, tuned (step 0.25)",
    ]
    assert rows["D-PSGD"][:2] == ["85.00", "0.00"]
    assert rows["CHOCO, top 1%, untuned (step 1.308)"][0] == "10.00 (2 of 2 diverged)"
    assert [row[0] for row in tuning.rows] == list(powergossip.PEERS)
    assert tuning.rows[0][1:] == ["63.84", "70.00", "80.00", "85.00", "82.00", "80.75", "80.20"]
    verdicts = {claim.claim: claim.holds for claim in claims}
    assert len(verdicts) == len(claims) == 2 * (2 * 3 + 1)
    assert not verdicts["PowerGossip, rank 1, untuned, is on par with D-PSGD, label-skewed shards"]
    assert verdicts["PowerGossip, rank 1, 2 iterations, untuned, is on par with D-PSGD, label-skewed shards"]
    for claim, holds in verdicts.items():
        if "beats" in claim or "top 1%" in claim:
            assert holds, claim


def test_without_a_grid_nobody_is_tuned():
    training = SimpleNamespace(graph=graphs.ring(8), steps=900, skew=0.0, run=made_up)
    claims = []
    (trained,) = powergossip._training_tables(training, 1, (), claims, lambda text: None)
    assert len(trained.rows) == 2 + 2 + 3
    assert len(claims) == 2 * (1 + 3)
