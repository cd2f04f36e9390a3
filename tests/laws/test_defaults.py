"""Laws: a script's torch.set_default_dtype or set_default_device changes no bit, then or later."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from helpers.defaults import DEFAULTS

TESTS = Path(__file__).parents[1]


@cache
def found():
    run = subprocess.run(
        [sys.executable, "-m", "helpers.defaults"], cwd=TESTS, capture_output=True, text=True, timeout=150
    )
    assert run.returncode == 0, run.stderr
    return {default: answers for line in run.stdout.splitlines() for default, answers in json.loads(line).items()}


@pytest.mark.parametrize("default", DEFAULTS[1:])
def test_defaults_change_no_bit(default):
    (expected,) = found()["none"]
    under, afterwards = found()[default]
    assert [what for what in expected if under[what] != expected[what]] == []
    assert [what for what in afterwards if afterwards[what] != expected[what]] == []
    assert len(afterwards) > 40
