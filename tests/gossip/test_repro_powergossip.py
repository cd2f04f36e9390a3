"""`thinwire repro powergossip`: its quick claims hold, and its training trains and counts."""

import pytest

from thinwire.gossip import graphs
from thinwire.lab import datasets, repro_powergossip
from thinwire.lab.gossip_training import Training


def test_consensus_bytes_and_graphs_are_the_papers():
    result = repro_powergossip.run(True, None, 1, lambda text: None)
    assert len(result["claims"]) == 3 * 2 + 3 + 3
    assert [claim for claim in result["claims"] if not claim["holds"]] == []


@pytest.mark.parametrize("mixer", [None, "dpsgd", "powergossip", "choco(codec='topk(density=0.01)', step=0.1)"])
@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_training_learns(mixer, skew):
    training = Training(datasets.embedded_images(), graphs.ring(4), steps=40, skew=skew)
    outcome = training.run(mixer, seed=0)
    assert outcome.accuracy > 40
    if mixer == "dpsgd":
        weights = 8 * 25 + 8 + 16 * 72 + 16 + 32 * 784 + 32 + 10 * 32 + 10
        assert outcome.bytes_per_step == 2 * 4 * weights * 39 / 40  # the first mix finds equal replicas


@pytest.mark.full
def test_every_peer_is_tuned_and_judged(monkeypatch):
    """The training table, far too short to judge anybody: every method has a row, every pair a claim."""
    monkeypatch.setattr(repro_powergossip, "STEPS", (1.0, 0.1))
    training = Training(datasets.embedded_images(), graphs.ring(4), steps=3)
    claims = []
    table = repro_powergossip._training_table(training, 1, claims, lambda text: None)
    assert len(table["rows"]) == 4 + 2 * 3
    assert len(claims) == 2 * (2 * 3 + 1)
    assert all(set(claim) == {"claim", "measured", "expected", "holds"} for claim in claims)
