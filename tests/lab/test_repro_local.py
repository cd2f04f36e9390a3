"""The reproduction's parts: settings are the recipes', claims follow from the runs, and real runs give a table."""

import pytest

from helpers.runs import made_up
from thinwire.lab.network.network import parse_network
from thinwire.lab.repro import local as repro
from thinwire.local import recipes

TINY = "text(width=16, batch=4, steps=4, evaluate_every=2)"


def outcome(setting, scores, nbytes=1e6, rounds=4, reason=None):
    runs = [made_up(setting.title, 1.0, [1.0, score], rising=False) for score in scores]
    for run in runs:
        run.totals |= {"bytes_sent": nbytes, "rounds": rounds}
        run.reason = reason
    return repro.Outcome(setting, runs)


def outcomes(**scores):
    """By title; 4.0 for all that is not said otherwise."""
    named = {
        "ddp": repro.DDP, "streaming": repro.STREAMING, "sparse": repro.SPARSE,
        "two": repro.few_bits(repro.TWO_BITS, True), "bare": repro.few_bits(repro.TWO_BITS, False),
    }  # fmt: skip
    found = {each.title: outcome(each, [4.0, 4.0]) for each in repro.settings(quick=False)}
    return found | {named[name].title: outcome(named[name], each) for name, each in scores.items()}


def holding(found):
    return [claim.holds for claim in repro.claims_of("text", found)]


def test_claims_follow_from_what_was_measured():
    alike = outcomes()
    assert holding(alike) == [True, True, True, True, True, False]  # 2 bits without feedback lost nothing either
    assert holding(outcomes(bare=[4.1, 4.1]))[-1]
    assert holding(outcomes(ddp=[3.9, 3.9]))[0] is False
    said = repro.claims_of("text", outcomes(sparse=[4.05, 4.05], streaming=[4.01, 4.011], two=[9.0, 4.0]))
    assert [claim.verdict for claim in said][1:5] == ["fails", "holds", "holds", "level"]
    assert {claim.source for claim in said} == {"paper", "ours"}


def test_streaming_sends_a_part_at_a_time():
    whole = outcome(repro.diloco(repro.H), [4.0], nbytes=8e6)
    parts = outcome(repro.STREAMING, [4.0], nbytes=8e6)
    assert (whole.bytes_at_once, parts.bytes_at_once) == (2e6, 0.5e6)
    found = outcomes() | {repro.STREAMING.title: outcome(repro.STREAMING, [4.0, 4.0], nbytes=2e6)}
    assert holding(found)[3] is False


def test_differences_are_of_the_same_seeds_with_their_interval():
    one, other = outcome(repro.SPARSE, [4.4, 5.5]), outcome(repro.DDP, [4.0, 5.0])
    found, text = repro.difference(one, other)
    assert found.mean == pytest.approx(0.1) and text == "+10.0% ±0.0%"
    failed = outcome(repro.SPARSE, [4.4, 5.5], reason="worker 1 failed")
    found, text = repro.difference(failed, other)
    assert found.mean == float("inf") and text == "failed: worker 1 failed"
    claim = repro.as_good("", failed, other, "")
    assert claim.verdict == "fails" and claim.why_not == "failed: worker 1 failed"
    less = repro.as_good("", outcome(repro.SPARSE, [4.4, 5.5], nbytes=2e5, rounds=30), other, "")
    assert less.why_not == "it sends 0.2 of the other's bytes, in 30 rounds"


def test_settings_are_the_recipes():
    plan = repro.SPARSE.plan(TINY, 3, "none", None)
    given = {"every": plan.every, "scheme": plan.scheme, "outer": plan.outer, **plan.options}
    assert given == recipes.sparseloco(every=30) and plan.seed == 3
    ddp = repro.DDP.plan(TINY, 0, "none", None)
    assert (ddp.every, ddp.scheme, ddp.options) == (1, "fp32", {})


def test_real_runs_make_a_table(monkeypatch):
    monkeypatch.setattr(repro, "WORKERS", 2)
    chosen = [repro.DDP, repro.Setting("streaming", recipes.streaming(every=2, parts=2, delay=1))]
    found = repro.train_all(TINY, chosen, parse_network("none"), 1, None, lambda text: None)
    listing = repro._table(TINY, found, "none")
    assert "bits per byte (less is better)" in listing.title
    assert [row[2] for row in listing.rows] == ["4", "2"] and all(float(row[1]) < 8.5 for row in listing.rows)
    assert found["streaming"].bytes_at_once < 0.4 * found[repro.DDP.title].bytes_at_once
