"""The reproduction's parts: its claims on Laplace data hold, and its training trains."""

import pytest
import torch

from thinwire.lab.repro import tnq
from thinwire.lab.tasks.tasks import load_task


def test_the_claims_on_laplace_data_hold():
    claims = []
    table = tnq._laplace_table(claims, lambda text: None)
    assert len(claims) == 15
    assert [claim.claim for claim in claims if not claim.holds] == []
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_training_measures_the_error_of_the_mean_gradient():
    torch.manual_seed(0)
    task = load_task("cnn")
    accuracy, error = tnq._train(task, "fp32", False, 2, 0)
    assert 0.0 <= accuracy <= 1.0 and error < 1e-10
    _, coarse = tnq._train(task, tnq._spec("QSGD", 2), False, 2, 0)
    _, fine = tnq._train(task, tnq._spec("TNQ", 2), False, 2, 0)
    assert 0 < fine < coarse


def test_best_is_decided_by_the_seeds_agreement():
    others = {"QSGD": [0.5, 0.5], "NQ": [0.6, 0.6], "TQ": [0.7, 0.7]}
    for scores, verdict in (([0.74, 0.741], "holds"), ([0.66, 0.73], "level"), ([0.65, 0.651], "fails")):
        assert tnq._accuracy_claim(2, others | {"TNQ": scores}, 0.8).verdict == verdict


@pytest.mark.full
def test_every_claim_is_made():
    said = tnq.reproduce(True, None, 2, lambda text: None)
    assert {table.title[:10] for table in said.tables} == {"Squared er", "A CNN on t"}
    failed = [claim for claim in said.claims if claim.verdict == "fails" and claim.reason is None]
    assert failed == []
