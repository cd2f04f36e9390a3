"""The network gives what the virtual workers get, bit for bit where the arithmetic allows, and counts what it sends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.gradients import error, gradient
from helpers.models import mlp
from helpers.specs import every_spec
from helpers.training import MANY_BUCKETS, train
from helpers.world import run_world
from thinwire.core.bucket import Bucket
from thinwire.core.feedback import wrap
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.exchange.exchange import drive
from thinwire.schemes import parse

SHAPES = [("w", (37, 53)), ("b", (11,)), ("v", (8, 200))]
STEPS = 3


def inputs(step, worker):
    return {name: gradient(*shape, seed=1000 * step + 10 * worker + i) for i, (name, shape) in enumerate(SHAPES)}


def on_the_network(spec, feedback, route):
    """[each step's mean], the ledger's totals and the final memory of this rank, by AllReduce without DDP."""
    scheme = wrap(parse(spec), feedback)
    exchange = tw.AllReduce(route=route)
    exchange.open(dist.group.WORLD, scheme)
    layout, memory, means = Layout.of(SHAPES), Memory(), []
    for name, shape in SHAPES:
        memory.add(name, scheme.init(name, torch.zeros(shape), 0))
    for step in range(STEPS):
        flat = torch.cat([t.reshape(-1) for t in inputs(step, exchange.worker).values()])

        def begin(scratch, flat=flat, step=step):
            bucket = Bucket(flat, layout, exchange.workers, exchange.worker, step, 0, None, scratch)
            return drive(scheme.converse(bucket, memory, scheme.level), exchange, scratch)

        job = exchange.lane.submit(begin, last=True, done=lambda error: None)
        job.wait()
        if job.error:
            raise job.error
        means.append(job.result.clone())
    totals = exchange.transport.ledger.totals()
    exchange.close()
    return means, totals, {key: tensor.clone() for key, tensor in memory.items()}


def virtually(spec, feedback, route, workers):
    simulation = tw.Simulation(spec, workers=workers, feedback=feedback, route=route)
    means = []
    for step in range(STEPS):
        mean = simulation.reduce([inputs(step, worker) for worker in range(workers)])
        means.append(torch.cat([tensor.reshape(-1) for tensor in mean.values()]))
    return means, simulation


def exact_mean(step, workers):
    flats = [torch.cat([t.reshape(-1) for t in inputs(step, worker).values()]) for worker in range(workers)]
    return sum(flats) / workers


def _all(specs):
    return {key: on_the_network(*key) for key in specs}


def cases():
    """(spec, feedback, route); a forced two-shot only where payloads can be cut."""
    found = []
    for spec in every_spec():
        routes = ["gather", "two-shot"] if getattr(parse(spec), "grain", None) else ["auto"]
        found += [(spec, feedback, route) for feedback in ("auto", True) for route in routes]
    return found


@pytest.mark.parametrize("workers", [2, 4])
def test_network_equals_simulation(workers):
    results = run_world(_all, workers, cases())
    for case in cases():
        expected, simulation = virtually(*case, workers)
        sent = 0.0
        for rank in range(workers):
            means, totals, memory = results[rank][case]
            sent += totals["bytes_sent"]
            for step, (mean, right) in enumerate(zip(means, expected, strict=True)):
                if workers == 2 or parse(case[0]).rank_order:
                    assert torch.equal(mean, right), case
                else:
                    # More than two floats are added in an order of the all-reduce's own. That may tip a choice between
                    # two equals, so the entries may differ, but not how far they are from the truth.
                    exact = exact_mean(step, workers)
                    assert abs(error(mean, exact) - error(right, exact)) < 0.02 * (1 + error(right, exact)), case
            if workers == 2 or parse(case[0]).rank_order:
                for key, tensor in simulation.memories[rank].items():
                    assert torch.equal(memory[key], tensor), (case, key)
        assert sent / workers == pytest.approx(simulation.bytes_sent, rel=0.02, abs=64 * STEPS), case


def _counted(specs):
    """Counted where torch.distributed itself hands them to a group: {its method: which argument is given}."""
    given = []
    for method, which in {"allreduce": 0, "all_gather_single": 1, "all_to_all_single": 1}.items():
        plain = getattr(dist.ProcessGroup, method)

        def counted(group, *args, plain=plain, which=which):
            tensor = args[which][0] if which == 0 else args[which]
            given.append(tensor.numel() * tensor.element_size())
            return plain(group, *args)

        setattr(dist.ProcessGroup, method, counted)
    stats = {}
    for spec in specs:
        model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
        with tw.attach(model, spec) as wire:
            given.clear()  # workers agreed on something by then
            train(model, 3)
            stats[spec] = (wire.stats(), sum(given), len(given))
    return stats


def test_the_ledger_counts_the_tensors_given_to_collectives():
    for stats in run_world(_counted, 3, every_spec()):
        for spec, (told, given, calls) in stats.items():
            assert told["bytes_given"] == given, spec
            assert told["messages"] == calls, spec
            assert told["bytes_dense"] == 3 * 4 * sum(p.numel() for p in mlp().parameters())
            assert all(type(key) is str and type(value) is float for key, value in told.items())


@pytest.fixture(scope="module")
def traffic():
    """{"SPEC WORKERS": [(bytes the interface saw, bytes each rank counted)]} on a loopback of its own."""
    command = [sys.executable, "-m", "helpers.loopback", "fp32", "fp16", "qsgd(bits=4)"]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=150)
    if "cannot make a network namespace" in run.stderr:
        pytest.skip("this user may not make network namespaces, and a shared loopback carries others' traffic")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_bytes_sent_are_what_the_interface_saw(traffic):
    """TCP and the barriers around the measurement add a little."""
    for case, ranks in traffic.items():
        sent = sum(sent for _, sent in ranks)
        seen = min(seen for seen, _ in ranks)
        assert sent <= seen <= 1.03 * sent, case


def test_qsgd_costs_its_bits_and_its_scales(traffic):
    """4 bits and 32/1024 of scale per entry, whatever the number of workers; 16-bit sums cost 16."""
    for workers in (2, 4):
        passes = 2 * (workers - 1) / workers  # of every entry through a worker's interface, by any of these ways
        bits = {
            spec: 8 * traffic[f"{spec} {workers}"][0][1] / 5 / 1_500_000 / passes for spec in ("fp16", "qsgd(bits=4)")
        }
        assert bits["fp16"] == pytest.approx(16, rel=1e-3)
        # Parts are cut at whole blocks and padded to the longest.
        assert bits["qsgd(bits=4)"] == pytest.approx(4 + 32 / 1024, rel=2e-3)
