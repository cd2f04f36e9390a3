"""The comparison as it happens, drawn by hand."""

import io
from dataclasses import replace

from rich.console import Console

from helpers.runs import made_up
from thinwire.lab.report.progress import LiveTable
from thinwire.lab.runs.record import CurvePoint, RunPlan

PLANS = [
    RunPlan("mlp", "fp16", 0),
    RunPlan("mlp", "qsgd(bits=4)", 0, controller="mqgrad"),
    RunPlan("mlp", "fp32", 0, "server"),
    RunPlan("mlp", "powergossip", 0, "gossip"),
]


def drawn(live, console):
    console.print(live.__rich__())
    return console.file.getvalue()


def test_a_line_per_run_with_bar_loss_score_and_seconds():
    console = Console(file=io.StringIO(), width=120)
    live = LiveTable(PLANS, console)
    live.started(30, "accuracy")
    live.finished(made_up("fp16", 2.0, [0.5, 0.8, 0.85]))
    live.finished(made_up("qsgd(bits=4)", 1.0, [0.1], reason="worker 1 was killed by SIGKILL"))
    live.started(40, "accuracy")
    live.advanced(CurvePoint(20, 3.25, 1e6, 0.4567, 0.72))
    head, _, first, second, third, fourth = drawn(live, console).splitlines()[-6:]
    assert head.strip() == "run 3 of 4"
    for text in ("fp16", "allreduce", "━", "30/30", "0.333", "85.0%", "6.0"):
        assert text in first
    assert "by mqgrad" in second and "failed: worker 1 was killed by SIGKILL" in second
    for text in ("fp32", "server", "━", "20/40", "0.457", "72.0%", "3.2"):
        assert text in third
    assert "powergossip" in fourth and "gossip" in fourth and "waiting" in fourth


def test_without_a_terminal_it_is_a_line_per_run():
    console = Console(file=io.StringIO(), width=40)  # lines are not broken for it
    with LiveTable(PLANS, console) as live:
        live.started(30, "accuracy")
        live.finished(made_up("fp16", 2.0, [0.5, 0.8, 0.85]))
        live.finished(made_up("fp16", 2.0, [0.5], exchange="server"))
    first, second = console.file.getvalue().splitlines()
    assert first == "[1/4] mlp fp16 over allreduce seed 0: 85.0% after 30 steps, 6.0 s on none"
    assert second.endswith("fp16 over server seed 0: 50.0% after 10 steps, 2.0 s on none")


def test_timed_steps_are_shown_as_such():
    console = Console(file=io.StringIO(), width=120)
    timed = made_up("fp16", 2.0, [0.5])
    timed = replace(timed, plan=replace(timed.plan, timed=10, network="paced:1mbit"), curve=[])
    with LiveTable([timed.plan, PLANS[1]], console) as live:
        live.started(10, "accuracy")
        live.finished(timed)
    assert "200 ms a step on paced:1mbit" in console.file.getvalue()
    assert "timed" in drawn(live, console)
