"""Under torchrun: a worker dies, the whole group is started again, and the run ends as if nothing had happened."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"
STEPS, SAVED_EVERY, DIES_AT = 50, 25, 33


def torchrun(folder, servers, *options):
    """The example on two workers and its last checkpoint, one per worker, and what it printed."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1",
        "--nproc-per-node", str(servers + 2), str(EXAMPLE),
        "--servers", str(servers), "--steps", str(STEPS), "--checkpoints", str(folder),
        "--scheme", "tnq(bits=4)", "--down", "fp16", "--controller", "normrule(budget=4, interval=5)", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"worker{worker}.pt", weights_only=True) for worker in range(2)], done.stdout


def parts(state, place=""):
    """Every tensor and number of a state, by its place."""
    if isinstance(state, dict | list | tuple):
        named = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: value for name, each in named for key, value in parts(each, f"{place}/{name}").items()}
    return {place: state}


def same(left, right):
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_that_torchrun_restarted_ends_as_the_uninterrupted_one_to_the_bit(servers, tmp_path):
    expected, told = torchrun(tmp_path / "whole", servers)
    assert "from step" not in told
    restarted, told = torchrun(tmp_path / "restarted", servers, "--die-at", str(DIES_AT))
    assert f"from step {SAVED_EVERY}" in told  # it did die, and came back from the checkpoint
    for theirs, ours in zip(map(parts, expected), map(parts, restarted), strict=True):
        assert theirs.keys() == ours.keys()
        # The ledgers may differ: the restarted run has described its operations twice.
        assert [key for key in theirs if not key.startswith("/wire/ledger") and not same(theirs[key], ours[key])] == []
    compared = " ".join(parts(expected[0]))
    for part in (
        "model",
        "momentum_buffer",
        "worker0000/0.weight/residual",
        "server0000/memory",
        "steering/learnt/bins",
    ):
        assert part in compared, part
