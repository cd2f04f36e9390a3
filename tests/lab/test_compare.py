"""compare: the record it keeps, what survives Ctrl-C, and what is refused before anything starts."""

import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from helpers.needs import shaping
from helpers.runs import made_up, record_of
from thinwire import cli
from thinwire.lab.network import shaped
from thinwire.lab.runs import compare as module
from thinwire.lab.runs.compare import compare
from thinwire.lab.runs.record import Record

TINY = "regression(steps=6)"

SCRIPT = """
import signal, sys
from pathlib import Path
from thinwire.lab.runs.compare import compare
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    file = Path(sys.argv[1])
    compare(["regression(steps=60)"], ["fp16"], workers=2, seeds=8, network="shaped:1gbit", json=file)
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


def test_a_row_may_have_rounds_of_its_own(monkeypatch, console):
    """As the table names it; everybody else keeps to --every."""
    monkeypatch.setattr(
        module, "execute", lambda plan, *_: replace(made_up(plan.scheme, 1.0, [0.9], seed=plan.seed), plan=plan)
    )
    asked = ["qsgd(bits=8)", "qsgd(bits=8) every 4", "topk every 2"]
    record = compare([TINY], asked, network="none", workers=2, console=console)
    assert [run.plan.name for run in record.runs] == ["fp16", "qsgd(bits=8)", "qsgd(bits=8) every 4", "topk every 2"]
    record = compare([TINY], ["topk every 2", "qsgd"], every=[1, 3], network="none", workers=2, console=console)
    assert [run.plan.name for run in record.runs] == ["fp16", "topk every 2", "qsgd", "qsgd every 3"]
    for schemes, options, complaint in (
        (["qsgd every 0"], {}, "at least 1 step"),
        (["qsgd", "qsgd every 1"], {}, "the same row is named twice"),
        (["dpsgd every 4"], {"exchanges": ["gossip"]}, "exchanges in every step"),
        (["qsgd every 4"], {"parallel": "fsdp"}, "exchanges in every step"),
    ):
        with pytest.raises(ValueError, match=complaint):
            compare([TINY], schemes, network="none", workers=2, console=console, **options)


@pytest.mark.parametrize("exchange", ["allreduce", "server"])
def test_local_steps_are_rows_of_their_own(exchange, console):
    record = compare(
        [TINY], ["qsgd(bits=8)"], exchanges=[exchange], every=[1, 4], network="none", workers=2, console=console
    )
    local = record.runs[-1]
    assert [run.reason for run in record.runs] == [None] * 3
    assert [(run.plan.scheme, run.plan.every) for run in record.runs] == [
        ("fp16", 1), ("qsgd(bits=8)", 1), ("qsgd(bits=8)", 4),
    ]  # fmt: skip
    assert local.totals["rounds"] == 2 and record.runs[1].totals["rounds"] == 6  # of 4 and of 3 steps
    assert [run.totals["steps"] for run in record.runs] == [6, 6, 7] and local.steps == 7  # 1.2 times as many
    assert local.totals["bytes_sent"] < 0.5 * record.runs[1].totals["bytes_sent"]
    shown = console.file.getvalue()
    assert "qsgd(bits=8) every 4" in shown and "rounds" in shown and "share" in shown
    assert "for more steps than the others: qsgd(bits=8) every 4 1.2x" in " ".join(shown.split())


def test_without_arguments_one_row_is_of_local_steps(monkeypatch, console):
    monkeypatch.setattr(module, "execute", lambda plan, links, on_point: replace(made_up("x", 1.0, [0.9]), plan=plan))
    record = compare([TINY], network="none", console=console)
    assert record.config["every"] == [1, 8]


@pytest.mark.parametrize("options, message", [
    ({"every": [0]}, "every must be at least 1 step, got 0"), ({"every": [2, 2]}, "the same every is named twice"),
    ({"every": [8], "exchanges": ["gossip"], "schemes": ["dpsgd"]}, "gossip exchanges in every step"),
    ({"every": [8], "outer": "adam"}, "unknown outer optimizer"),
    ({"every": [8], "longer": 0.0}, "longer must be above 0, got 0"),
])  # fmt: skip
def test_local_steps_that_cannot_be_are_refused(options, message, console):
    with pytest.raises(ValueError, match=message):
        compare([TINY], network="none", console=console, **options)


def test_a_failed_run_is_a_row_and_the_rest_goes_on(monkeypatch, console):
    def execute(plan, links, on_point):
        reason = "worker 1 was killed by SIGKILL" if plan.scheme == "fp32" else None
        return replace(made_up(plan.scheme, 1.0, [0.9], reason=reason), plan=plan)

    monkeypatch.setattr(module, "execute", execute)
    record = compare([TINY], ["fp32", "fp16", "bf16"], network="none", seeds=1, console=console)
    assert [run.reason is None for run in record.runs] == [False, True, True]
    assert "fp32: Failed: worker 1 was killed by SIGKILL." in console.file.getvalue()


def test_ctrl_c_keeps_what_is_finished(monkeypatch, tmp_path, console):
    def execute(plan, links, on_point):
        if plan.scheme == "bf16":
            raise KeyboardInterrupt
        return replace(made_up(plan.scheme, 1.0, [0.9]), plan=plan)

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
        while "[9/16]" not in process.stdout.readline():  # eight are timed, this one is trained
            assert process.poll() is None
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does: the workers get it too
        else:
            process.kill()
        rest = process.stdout.read()  # ends when the last process that shares the pipe has ended
    assert len(json.loads(file.read_text())["runs"]) >= 1
    if how == signal.SIGINT:
        assert process.returncode == 0 and "ended well" in rest and json.loads(file.read_text())["interrupted"]
    assert not [namespace for namespace in shaped.existing() if f"tw-{process.pid}-" in namespace]


def test_a_terminated_command_keeps_what_is_finished_and_says_nothing_odd(tmp_path):
    file = tmp_path / "record.json"
    words = ["compare", "--task", "regression(steps=60)", "--scheme", "fp16", "--workers", "2", "--seeds", "50",
             "--network", "none", "--json", str(file), "--report", str(tmp_path / "report.html")]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while "[1/50]" not in process.stdout.readline():
            assert process.poll() is None
        process.terminate()
        out, err = process.communicate()
    assert process.returncode == 130 and err == ""
    assert "fp16" in out and json.loads(file.read_text())["interrupted"]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"schemes": ["zip"]}, "unknown scheme 'zip'"),
        ({"schemes": ["fp16", "fp16"]}, "named twice"),
        ({"tasks": ["chess"]}, "unknown task 'chess'"),
        ({"tasks": ["fashion"]}, "--data"),
        ({"network": "shaped:fast"}, "cannot read the rate 'fast'"),
        ({"network": "none:1mbit"}, "takes no rate"),
        ({"network": "paced:1mbit,7=2mbit"}, "worker 7"),
        ({"network": []}, "at least one network"),
        ({"network": ["none", "none"]}, "the same network is named twice"),
        ({"exchanges": ["pigeon"]}, "unknown exchange 'pigeon'"),
        ({"exchanges": []}, "at least one exchange"),
        ({"exchanges": ["server(servers=0)"]}, "servers must be at least 1, got 0"),
        ({"exchanges": ["server(staleness=1, down='qsgd')"]}, "down is one of fp32, fp16, bf16, got 'qsgd'"),
        ({"exchanges": ["server(staleness=1)"], "schemes": ["powersgd"]}, "is a conversation of the whole group"),
        ({"exchanges": ["gossip(graph='web')"], "schemes": ["dpsgd"]}, "graph must be one of ring"),
        ({"exchanges": ["gossip(graph='hypercube')"], "schemes": ["dpsgd"], "workers": 3}, "a hypercube has 2, 4, 8"),
        ({"exchanges": ["gossip"], "schemes": ["qsgd"]}, "qsgd compresses gradients, gossip mixes weights"),
        ({"exchanges": ["gossip"], "schemes": ["zip"]}, "unknown scheme 'zip'"),
        ({"exchanges": ["allreduce"], "schemes": ["dpsgd"]}, "needs --exchange gossip"),
        ({"exchanges": ["allreduce", "server"], "schemes": ["fp16", "dpsgd"]}, "needs --exchange gossip"),
        ({"controllers": ["autopilot"]}, "unknown controller 'autopilot'"),
        ({"controllers": ["schedule"]}, "schedule needs levels_at"),
        ({"controllers": ["mqgrad"]}, "mqgrad has nothing to turn"),
        ({"controllers": ["fixed(level=99)"], "schemes": ["qsgd"]}, "99"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"workers": 1}, "workers must be at least 2, got 1"),
        ({"workers": "2x0"}, "such as 2x2; got '2x0'"),
        ({"workers": "many"}, "such as 2x2; got 'many'"),
        ({"workers": "2x2", "network": "paced:1mbit"}, "need shaped links, or none at all"),
        ({"exchanges": ["hierarchical(inside='topk(density=0.1)')"]}, "right on average"),
        ({"parallel": "pipeline"}, "parallel must be ddp or fsdp, got 'pipeline'"),
        ({"parallel": "fsdp", "exchanges": ["server"]}, "fsdp is for --exchange allreduce"),
        ({"parallel": "fsdp", "every": [8]}, "fsdp is for --exchange allreduce"),
        ({"parallel": "fsdp", "schemes": ["powersgd"]}, "is a conversation of the whole group"),
        ({"parallel": "fsdp", "schemes": ["topk"]}, "between shards a scheme must be right on average; topk is not"),
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


def test_schemes_and_mixers_go_where_they_can_travel(monkeypatch, console):
    monkeypatch.setattr(module, "execute", lambda plan, links, on_point: replace(made_up("x", 1.0, [0.9]), plan=plan))
    record = compare(
        [TINY], ["qsgd", "fp32", "dpsgd"], exchanges=["server", "gossip"], controllers=["mqgrad"], network="none",
        seeds=1, workers=2, console=console,
    )  # fmt: skip
    assert [(run.plan.exchange, run.plan.scheme, run.plan.controller) for run in record.runs] == [
        ("allreduce", "fp16", None),  # the baseline, unasked
        ("server", "qsgd", None),
        ("server", "qsgd", "mqgrad"),
        ("server", "fp32", None),
        ("gossip", "dpsgd", None),
    ]
    shown = console.file.getvalue()
    for text in ("qsgd by mqgrad over server: ", "dpsgd over gossip: ", "fp16 over allreduce: The baseline"):
        assert text in shown
    without = compare([TINY], exchanges=["gossip"], network="none", workers=2, console=console)
    assert {"dpsgd", "powergossip"} < {run.plan.scheme for run in without.runs}


def test_machines_of_several_workers(console):
    record = compare(
        [TINY], ["fp16"], exchanges=["allreduce", "hierarchical(inside='bf16')"], network="none", workers="2x2",
        steps=2, console=console,
    )  # fmt: skip
    assert [run.reason for run in record.runs] == [None, None]
    assert {(run.plan.workers, run.plan.local) for run in record.runs} == {(4, 2)}
    assert "2 machines of 2 workers" in console.file.getvalue()


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


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}', '{"format": 3}'])
def test_files_that_are_no_record_are_refused(text, tmp_path):
    file = tmp_path / "x.json"
    with pytest.raises(ValueError, match="missing file"):
        Record.load(file)
    file.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        Record.load(file)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["compare", "--scheme", "zip"], "unknown scheme 'zip'"),
        (["compare", "--task", "fashion", "--data", "/nowhere"], "/nowhere"),
        (["compare", "--network", "shaped:fast"], "cannot read the rate 'fast'"),
        (["compare", "--exchange", "gossip", "--scheme", "qsgd"], "mixes weights"),
        (["compare", "--seeds", "0"], "seeds must be at least 1"),
        (["report", "/nowhere/record.json"], "missing file: /nowhere/record.json"),
    ],
)
def test_the_command_says_mistakes_in_one_line(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thinwire", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == ""
    assert told.err.startswith("thinwire: ") and said in told.err and told.err.count("\n") == 1


def test_the_command_makes_the_page_again(tmp_path, monkeypatch, capsys):
    file, page = tmp_path / "record.json", tmp_path / "page.html"
    record_of(made_up("fp16", 1.0, [0.9])).save(file)
    monkeypatch.setattr(sys, "argv", ["thinwire", "report", str(file), str(file), "--out", str(page)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0 and page.read_text().count("The baseline") == 2
