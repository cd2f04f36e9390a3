"""Runs: real workers, a real exchange; what fails says why, and nothing is left running."""

import multiprocessing
import os
import signal

import pytest
import torch

from helpers.needs import shaping
from thinwire.lab.network.network import parse_network
from thinwire.lab.network.shaped import Shaped
from thinwire.lab.report import table
from thinwire.lab.runs.probe import Replicas, statistics
from thinwire.lab.runs.record import RunPlan
from thinwire.lab.runs.run import execute

SMALL = "mlp(width=64, evaluate_every=3, batch=16)"

FAILING = """
import torch
from dataclasses import replace
from thinwire.lab.tasks.tasks import load_task

def fails(data):
    def loss(outputs, y):
        if torch.distributed.get_rank() == 1:
            raise ArithmeticError("the loss went missing")
        return outputs.sum()
    return replace(load_task("regression"), loss=loss)
"""


def test_a_run_is_complete_and_repeatable():
    plan = RunPlan(SMALL, "fp32", seed=1, workers=2, steps=7)
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


@pytest.mark.parametrize("exchange, scheme", [("allreduce", "qsgd(bits=4)"), ("server", "fp16"), ("gossip", "dpsgd")])
def test_a_lossy_scheme_shows_its_error_and_a_paced_link_its_slowness(exchange, scheme):
    run = execute(RunPlan("regression", scheme, 0, exchange, network="paced:2mbit", workers=2, steps=2), None)
    assert run.reason is None
    if scheme == "qsgd(bits=4)":
        assert 1e-4 < run.totals["vnmse"] < 1
    assert run.totals["wire_seconds"] >= 0.9 * run.totals["bytes_sent"] * 8 / 2e6


def test_a_killed_worker_fails_the_run_with_its_reason():
    def kill_one(point):
        victim = multiprocessing.active_children()[0]
        os.kill(victim.pid, signal.SIGKILL)

    run = execute(RunPlan("regression", "fp32", 0, workers=3, steps=400), None, kill_one)
    assert run.reason is not None and "was killed by SIGKILL" in run.reason
    assert run.curve and run.totals == {}
    assert multiprocessing.active_children() == []


def test_a_failing_worker_fails_the_run_with_its_reason(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FAILING)
    run = execute(RunPlan(f"{file}:fails", "fp32", 0, workers=2, steps=3), None)
    assert run.reason == "worker 1 failed: ArithmeticError: the loss went missing"
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("exchange", ["server(servers=2)", "server(staleness=1)", 'gossip(graph="complete")'])
def test_every_exchange_trains(exchange):
    scheme = "dpsgd" if "gossip" in exchange else "fp32"
    run = execute(RunPlan(SMALL, scheme, seed=1, exchange=exchange, workers=2, steps=7), None)
    assert run.reason is None and [point.step for point in run.curve] == [3, 6, 7]
    assert run.curve[-1].loss < run.curve[0].loss
    phases = sum(run.totals[f"{phase}_seconds"] for phase in ("compute", "encode", "wire"))
    assert phases == pytest.approx(run.totals["seconds"])
    # Two ways to a server and back, or once to the only neighbour, who starts equal and needs nothing at first.
    dense = run.totals["bytes_dense"] * (1 if "gossip" in exchange else 2)
    assert run.totals["bytes_sent"] == pytest.approx(dense, rel=0.05) and run.totals["bytes_sent"] >= dense
    assert run.curve[-1].bytes_sent == pytest.approx(run.totals["bytes_sent"], rel=0.01)
    assert multiprocessing.active_children() == []


def test_a_server_gives_what_an_allreduce_gives():
    runs = [
        execute(RunPlan(SMALL, "fp32", 1, exchange, workers=2, steps=6), None) for exchange in ("allreduce", "server")
    ]
    losses = [[point.loss for point in run.curve] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert runs[1].totals["vnmse"] < 1e-12


def test_a_killed_server_fails_the_run_with_its_reason():
    def kill_the_server(point):
        first = min(multiprocessing.active_children(), key=lambda child: int(child.name.rpartition("-")[2]))
        os.kill(first.pid, signal.SIGKILL)

    run = execute(RunPlan("regression", "fp32", 0, "server", workers=2, steps=400), None, kill_the_server)
    assert run.reason == "server 0 was killed by SIGKILL"
    assert multiprocessing.active_children() == []


def test_a_controller_turns_the_knob():
    plan = RunPlan("regression(evaluate_every=2)", "qsgd(bits=8)", 0, workers=2, steps=8,
                controller="schedule(levels_at=((0, 2), (4, 8)), interval=2)")  # fmt: skip
    run = execute(plan, None)
    assert run.reason is None
    assert [point.level for point in run.curve] == [2, 2, 8, 8]


def test_the_mean_of_all_replicas_is_evaluated_and_given_back(tmp_path):
    models = [torch.nn.BatchNorm1d(3) for _ in range(2)]
    for number, model in enumerate(models):
        model.weight.data.fill_(number)
        model.running_mean.fill_(10.0 * number)
    tensors = [[model.weight.data, *statistics(model)] for model in models]
    other = Replicas(tensors[1], tmp_path / "rows", 1, 2, lambda: None)
    with other.averaged():
        pass  # its row is there

    with Replicas(tensors[0], tmp_path / "rows", 0, 2, lambda: None).averaged():
        assert models[0].weight.tolist() == [0.5] * 3 and models[0].running_mean.tolist() == [5.0] * 3
    assert models[0].weight.tolist() == [0.0] * 3 and models[0].running_mean.tolist() == [0.0] * 3
    assert models[1].weight.tolist() == [1.0] * 3


STATISTICS = """
import torch
from torch import nn
from thinwire.lab.tasks.datasets import Dataset, Examples
from thinwire.lab.tasks.tasks import Metric, Task

def apart(data):
    # Skewed, so that one worker has the inputs around 10 and the other those around -10, each of variance 1.
    inputs = torch.tensor([[9.0], [11.0], [-9.0], [-11.0]]).repeat(20, 1)
    examples = Examples(inputs, (inputs[:, 0] < 0).long())
    return Task(
        "apart", Dataset(examples, examples, examples), lambda: nn.BatchNorm1d(1, momentum=1.0),
        loss=lambda outputs, labels: outputs.sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        metric=Metric("square", lambda outputs, labels: outputs.square()[:, 0], rising=False),
        steps=2, batch=40, skew=1.0,
    )
"""


@pytest.mark.parametrize("how", [{}, {"every": 2}, {"parallel": "fsdp"}, {"exchange": "gossip", "scheme": "dpsgd"}])
def test_the_mean_of_the_workers_statistics_is_evaluated(how, tmp_path):
    """Batch norm of each worker alone would give 1 on its own inputs and 400 on the other's."""
    file = tmp_path / "mine.py"
    file.write_text(STATISTICS)
    run = execute(RunPlan(f"{file}:apart", seed=0, workers=2, **{"scheme": "fp32", **how}), None)
    assert run.reason is None
    mean_of_squares = 101 / (40 / 39)  # around 0; batch norm takes the unbiased variance
    assert run.score == pytest.approx(mean_of_squares, rel=1e-4)
    assert [point.score for point in run.curve][-1] == pytest.approx(mean_of_squares, rel=1e-4)


@shaping
def test_counted_bytes_are_sent_bytes():
    """Payload and gloo's headers, counted, are what the interfaces count: few large messages or many small ones."""
    cases = [
        ("allreduce", "fp16"), ("allreduce", "qsgd(bits=4)"), ("allreduce", "powersgd(factor_rank=1)"),
        ("server", "qsgd(bits=4)"), ("gossip", "powergossip"),
    ]  # fmt: skip
    with Shaped(parse_network("shaped:1gbit"), 3, servers=1) as links:
        for exchange, scheme in cases:
            run = execute(
                RunPlan("mlp(width=256, batch=16)", scheme, 0, exchange, network="shaped:1gbit", workers=3, steps=6),
                links,
            )
            assert run.reason is None
            assert abs(table.surplus(run)) < 0.03, (exchange, scheme, run.totals)
            assert run.totals["interface_bytes"] > run.totals["interface_payload_bytes"]


@shaping
def test_two_levels_send_less_between_machines():
    """Per machine of `local` workers, of S bytes: a flat ring of n sends 2 (n-1)/n S, of m machines 2 (m-1)/m S."""
    weights = 784 * 256 + 256 * 256 + 256 * 10 + 256 * 2 + 10
    sent = {}
    with Shaped(parse_network("shaped:1gbit"), 4, local=2) as links:
        for exchange in ("allreduce", "hierarchical"):
            run = execute(
                RunPlan("mlp(width=256, batch=16)", "fp32", 0, exchange, "shaped:1gbit", 4, steps=6, local=2), links
            )
            assert run.reason is None
            assert run.totals["bytes_sent"] == run.totals["interface_payload_bytes"]
            sent[exchange] = 2 * run.totals["bytes_sent"] / 6 / (4 * weights)  # of a machine, of a step
    assert sent["allreduce"] == pytest.approx(1.5, rel=0.01)
    assert sent["hierarchical"] == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("local", [1, 2])
def test_a_sharded_model_trains_like_a_whole_one(local):
    """Over all workers, and over each machine's with replicas on the others."""
    task = "text(width=16, steps=6, batch=4, evaluate_every=3)"
    ddp, fsdp = (
        execute(RunPlan(task, "fp32", 0, workers=4, local=local, parallel=parallel), None)
        for parallel in ("ddp", "fsdp")
    )
    assert fsdp.reason is None
    assert [p.score for p in fsdp.curve] == pytest.approx([p.score for p in ddp.curve], rel=1e-4)
    assert fsdp.curve[-1].score < fsdp.curve[0].score
