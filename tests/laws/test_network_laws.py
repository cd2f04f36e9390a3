"""What DDP's buckets cost: counted bytes are given bytes, and those that the network interface saw."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.exchanges import count_what_torch_is_given
from helpers.models import mlp
from helpers.specs import by_scheme
from helpers.training import MANY_BUCKETS, train
from helpers.world import run_world


def _counted(specs):
    given = count_what_torch_is_given()
    stats = {}
    for spec in specs:
        model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
        with tw.attach(model, spec) as wire:
            given.clear()  # workers agreed on something by then
            train(model, 3)
            stats[spec] = (wire.stats(), sum(given), len(given))
    return stats


@pytest.mark.parametrize("name", by_scheme())
def test_the_ledger_counts_the_tensors_given_to_collectives(name):
    for stats in run_world(_counted, 3, by_scheme()[name]):
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
