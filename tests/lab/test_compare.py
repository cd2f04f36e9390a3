"""compare: the record it keeps, what survives Ctrl-C, and what is refused before anything starts."""

import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
from needs import shaping
from rich.console import Console
from test_table import made_up

from thinwire.lab import compare as module
from thinwire.lab import shaped
from thinwire.lab.compare import compare
from thinwire.lab.record import Record

TINY = "regression(steps=6)"

SCRIPT = """
import sys
from pathlib import Path
from thinwire.lab.compare import compare
if __name__ == "__main__":
    file = Path(sys.argv[1])
    compare(["regression(steps=60)"], ["fp16"], workers=2, seeds=50, network="shaped:1gbit", json=file)
    print("ended well", flush=True)
"""


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


def test_a_comparison_from_start_to_end(tmp_path, console):
    record = compare(
        [TINY], ["fp32", "qsgd(bits=8)"], network="none", workers=2, seeds=2, console=console,
        json=tmp_path / "out" / "record.json", report=tmp_path / "report.html",
    )  # fmt: skip
    # fp16 is there unasked, and runs are interleaved over schemes.
    order = [(run.plan.scheme, run.plan.seed) for run in record.runs]
    assert order == [(scheme, seed) for seed in (0, 1) for scheme in ("fp16", "fp32", "qsgd(bits=8)")]
    assert Record.load(tmp_path / "out" / "record.json") == record
    shown = console.file.getvalue()
    assert shown.count("seed 1:") == 3 and "qsgd(bits=8): " in shown
    assert "qsgd(bits=8)" in (tmp_path / "report.html").read_text()
    losses = {run.plan.scheme: run.curve[-1].loss for run in record.runs if run.plan.seed == 1}
    assert losses["fp32"] == pytest.approx(losses["fp16"], rel=1e-2)  # same seed, same data, same start


def test_a_failed_run_is_a_row_and_the_rest_goes_on(monkeypatch, console):
    def execute(plan, links, on_point):
        reason = "worker 1 was killed by SIGKILL" if plan.scheme == "fp32" else None
        return made_up(plan.scheme, 1.0, [0.9], reason=reason)

    monkeypatch.setattr(module, "execute", execute)
    record = compare([TINY], ["fp32", "fp16", "bf16"], network="none", seeds=1, console=console)
    assert [run.reason is None for run in record.runs] == [False, True, True]
    assert "fp32: Failed: worker 1 was killed by SIGKILL." in console.file.getvalue()


def test_ctrl_c_keeps_what_is_finished(monkeypatch, tmp_path, console):
    def execute(plan, links, on_point):
        if plan.scheme == "bf16":
            raise KeyboardInterrupt
        return made_up(plan.scheme, 1.0, [0.9])

    monkeypatch.setattr(module, "execute", execute)
    file, page = tmp_path / "record.json", tmp_path / "report.html"
    record = compare([TINY], ["fp16", "bf16", "fp32"], network="none", json=file, report=page, console=console)
    assert record.interrupted and [run.plan.scheme for run in record.runs] == ["fp16"]
    assert Record.load(file) == record and page.exists()
    assert "interrupted" in console.file.getvalue()


@shaping
def test_kill_9_of_a_worker_costs_its_row_only(monkeypatch, console):
    execute = module.execute

    def kill_a_worker(point):
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    def sabotaged(plan, links, on_point):
        return execute(plan, links, kill_a_worker if plan.scheme == "fp32" else on_point)

    monkeypatch.setattr(module, "execute", sabotaged)
    record = compare(
        ["regression(steps=60)"], ["fp32", "fp16"], network="shaped:1gbit", workers=2, seeds=1, console=console
    )
    failed, other = record.runs
    assert failed.reason.endswith("was killed by SIGKILL") and failed.reason in console.file.getvalue()
    assert other.reason is None and other.curve[-1].step == 60
    assert multiprocessing.active_children() == []
    assert not [namespace for namespace in shaped.existing() if f"tw-{os.getpid()}-" in namespace]


@shaping
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopping_a_real_comparison_leaves_nothing_behind(how, tmp_path):
    file = tmp_path / "record.json"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert "[1/50]" in process.stdout.readline()
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does: the workers get it too
        else:
            process.kill()
        rest = process.stdout.read()  # ends when the last process that shares the pipe has ended
    assert len(json.loads(file.read_text())["runs"]) >= 1
    if how == signal.SIGINT:
        assert process.returncode == 0 and "ended well" in rest and json.loads(file.read_text())["interrupted"]
    assert not [namespace for namespace in shaped.existing() if f"tw-{process.pid}-" in namespace]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"schemes": ["zip"]}, "unknown scheme 'zip'"),
        ({"schemes": []}, "at least one scheme"),
        ({"schemes": ["fp16", "fp16"]}, "named twice"),
        ({"tasks": ["chess"]}, "unknown task 'chess'"),
        ({"tasks": ["fashion"]}, "--data"),
        ({"network": "shaped:fast"}, "cannot read the rate 'fast'"),
        ({"network": "none:1mbit"}, "takes no rate"),
        ({"network": "paced:1mbit,7=2mbit"}, "worker 7"),
        ({"exchange": "pigeon"}, "unknown exchange 'pigeon'"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"workers": 1}, "workers must be at least 2, got 1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"tasks": ["regression(batch=9999)"]}, "does not fit"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(changed, said, console):
    arguments = {"tasks": [TINY], "schemes": ["fp16"], "network": "none", "console": console} | changed
    with pytest.raises(ValueError) as caught:
        compare(**arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert console.file.getvalue() == "" and multiprocessing.active_children() == []


def test_shaped_without_root_is_one_line(monkeypatch, console):
    monkeypatch.setattr(shaped.os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=r"cannot be had: .*; paced needs no privileges"):
        compare([TINY], ["fp16"], network="shaped:1mbit", console=console)


def test_a_run_that_diverged_is_kept_as_valid_json(tmp_path):
    run = made_up("fp16", 1.0, [float("nan"), float("inf")])
    file = tmp_path / "record.json"
    Record({"seeds": 1}, [run]).save(file)
    assert "NaN" not in file.read_text() and "Infinity" not in file.read_text()
    loaded = Record.load(file).runs[0]
    assert math.isnan(loaded.curve[0].score) and loaded.seconds_to_target is None
    assert loaded.totals == run.totals


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}'])
def test_files_that_are_no_record_are_refused(text, tmp_path):
    file = tmp_path / "x.json"
    with pytest.raises(ValueError, match="missing file"):
        Record.load(file)
    file.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        Record.load(file)
