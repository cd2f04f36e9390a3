"""The Triton kernels without a card: every operation interpreted, in a process whose Triton interprets.

tests/kernels/interpreted is collected nowhere else.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.kernels.backends import fast

pytest.importorskip("triton")

HERE = Path(__file__).parent
GAPS = [
    f"{HERE / 'test_gaps.py'}::test_{name}" for name in ("statistics", "quantisers_there_and_back", "top_k", "draws")
]
LAWS = [str(HERE / "interpreted"), f"{HERE / 'test_backends.py'}::test_one_call_of_each_operation", *GAPS]


def interpreted(*options):
    """Run tests where Triton interprets; returns what they print in the end."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(600)
def test_every_operation_equals_its_reference():
    out = interpreted(*LAWS, "-vv")
    passed = [line for line in out.splitlines() if "PASSED" in line]
    assert len(passed) > 50 and "SKIPPED" not in out and all("[triton" in line for line in passed)
    generated = next(line for line in out.splitlines() if line.startswith("with generated arguments: "))
    backend = fast("cuda")[0]
    assert set(generated.split(": ")[1].split()) == set(backend.__all__) - {"takes"}


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_operation_equals_its_reference_at_length():
    interpreted(*LAWS, "--hypothesis-profile=long", "--timeout=3000")


def test_nothing_imports_triton_until_a_device_asks():
    code = "import sys, torch, thinwire; from thinwire import kernels; kernels.all_finite(torch.ones(3)); "
    code += "assert 'triton' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
