"""launch: plain env:// processes of a script, as a supervisor that does not kill the rest would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(script: str, workers: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """One process per rank of `script` (Python source), with RANK, WORLD_SIZE and MASTER_* set."""
    common = {
        "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env=os.environ | common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]


def outcome(process: subprocess.Popen[str], timeout: float) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a launched rank; it is killed if it does not end in time."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += "\n[killed: did not end in time]"
    return process.returncode, out, err
