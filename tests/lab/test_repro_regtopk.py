"""The reproduction's parts: its toy holds, its claims follow from what was measured, its tables are whole."""

import pytest

from thinwire.lab.repro import regtopk as repro
from thinwire.lab.tasks import datasets


def test_the_toys_claims_hold():
    claims = []
    table = repro._toy_table(claims)
    assert [claim.holds for claim in claims] == [True, True, True]
    assert [row[0] for row in table.rows] == list(repro.TOY_STEPS)


@pytest.mark.parametrize(
    "name, ends, holds",
    [
        ("RegTop-k", [-14.1, -14.5], True),
        ("RegTop-k", [-13.9, -14.5], False),
        ("Top-k", [-2.9, -3.4], True),
        ("Top-k", [-2.9, -3.6], False),
    ],
)
def test_every_seed_counts_for_the_regressions_claims(name, ends, holds):
    assert repro._regression_claim(name, ends).holds is holds


def test_the_margin_on_images_is_reported_as_it_is():
    for margins, verdict in (([1.0, 1.1, 0.9], "holds"), ([1.0, -0.5, 0.4], "level"), ([-1.0, -1.1, -0.9], "fails")):
        claim = repro._image_claim("anywhere", margins)
        assert claim.verdict == verdict and claim.source == "paper"
    assert claim.measured.startswith("-1.0 ±0.2 points")


def test_the_tables_hold_every_scheme_and_setting(monkeypatch):
    tiny = repro.Regression.draw(0, workers=3, points=20, size=10)
    monkeypatch.setattr(repro.Regression, "draw", lambda seed: tiny)
    monkeypatch.setattr(repro, "ROUNDS", (1, 2, 3))
    monkeypatch.setattr(repro.ImageRun, "accuracy", lambda run, scheme, dataset, seed: 50.0 + seed)
    monkeypatch.setattr(datasets, "embedded_images", lambda: None)
    said = repro.reproduce(False, None, 2, lambda text: None)
    regression, _, images = said.tables
    assert {(row[0], row[1]) for row in regression.rows} == {
        (density, name) for density in (0.4, 0.5, 0.55, 0.6, 0.9) for name in repro._schemes(density)
    }
    assert len(images.rows) == 2 * 5 and all(row[3] == "+0.0 ± 0.0" for row in images.rows)
    assert all(len(row) == len(table.columns) for table in said.tables for row in table.rows)
    assert sum(repro.CLAIMED_FOR_IMAGES in claim.claim for claim in said.claims) == 2
