"""Runs: real workers, a real exchange; what fails says why, and nothing is left running."""

import multiprocessing
import os
import signal

import pytest
from needs import shaping

from thinwire.lab import network
from thinwire.lab.record import Plan
from thinwire.lab.run import execute
from thinwire.lab.shaped import Shaped

SMALL = "mlp(width=64, evaluate_every=3, batch=16)"

FAILING = """
import torch
from dataclasses import replace
from thinwire.lab import tasks

def fails(data):
    def loss(outputs, y):
        if torch.distributed.get_rank() == 1:
            raise ArithmeticError("the loss went missing")
        return outputs.sum()
    return replace(tasks.load("regression"), loss=loss)
"""


def test_a_run_is_complete_and_repeatable():
    plan = Plan(SMALL, "fp32", seed=1, workers=2, steps=7)
    points = []
    run = execute(plan, None, points.append)
    assert run.reason is None and points == run.curve
    assert [point.step for point in run.curve] == [3, 6, 7]
    seconds = [point.seconds for point in run.curve]
    assert seconds == sorted(seconds) and seconds[0] > 0
    weights = 784 * 64 + 64 * 64 + 64 * 10 + 64 * 2 + 10
    assert run.curve[-1].bytes_sent == run.totals["bytes_sent"] == 7 * 4 * weights  # a ring of two sends it all once
    phases = sum(run.totals[f"{phase}_seconds"] for phase in ("compute", "encode", "wire"))
    assert phases == pytest.approx(run.totals["seconds"])
    assert run.totals["vnmse"] < 1e-12  # fp32 loses nothing
    again = execute(plan, None)
    assert [(p.loss, p.score) for p in again.curve] == [(p.loss, p.score) for p in run.curve]
    assert multiprocessing.active_children() == []


def test_a_lossy_scheme_shows_its_error_and_a_paced_link_its_slowness():
    run = execute(Plan("regression", "qsgd(bits=4)", 0, network="paced:1mbit", workers=2, steps=2), None)
    assert run.reason is None
    assert 1e-4 < run.totals["vnmse"] < 1
    assert run.totals["wire_seconds"] >= 0.9 * run.totals["bytes_sent"] * 8 / 1e6


def test_a_killed_worker_fails_the_run_with_its_reason():
    def kill_one(point):
        victim = multiprocessing.active_children()[0]
        os.kill(victim.pid, signal.SIGKILL)

    run = execute(Plan("regression", "fp32", 0, workers=3, steps=400), None, kill_one)
    assert run.reason is not None and "was killed by SIGKILL" in run.reason
    assert run.curve and run.totals == {}
    assert multiprocessing.active_children() == []


def test_a_failing_worker_fails_the_run_with_its_reason(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FAILING)
    run = execute(Plan(f"{file}:fails", "fp32", 0, workers=2, steps=3), None)
    assert run.reason == "worker 1 failed: ArithmeticError: the loss went missing"
    assert multiprocessing.active_children() == []


@shaping
def test_counted_bytes_are_sent_bytes():
    with Shaped(network.parse("shaped:1gbit"), 3) as links:
        for scheme in ("fp16", "qsgd(bits=4)"):
            run = execute(
                Plan("mlp(width=256, batch=16)", scheme, 0, network="shaped:1gbit", workers=3, steps=6), links
            )
            assert run.reason is None
            assert run.totals["interface_payload_bytes"] == pytest.approx(run.totals["bytes_sent"], rel=0.03)
            assert run.totals["interface_bytes"] > run.totals["interface_payload_bytes"]
