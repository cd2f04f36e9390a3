"""What the README and the examples show runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_python_in_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        run = subprocess.run([sys.executable, "-W", "error", "-c", block], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT)


def test_the_ddp_example_trains_and_resumes(tmp_path):
    script = ("--nproc-per-node", "2", "examples/ddp.py", "--steps", "20", "--checkpoint", str(tmp_path))
    first, second = torchrun(*script), torchrun(*script)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    losses = [float(re.search(r"loss ([\d.]+)", run.stdout)[1]) for run in (first, second)]
    assert losses[1] < losses[0]
    assert "step   40" in second.stdout
    assert int(re.search(r"gave (\d+)% of the bytes", second.stdout)[1]) < 20


@pytest.mark.parametrize(
    "arguments", [["list"], ["doctor"], ["--help"], ["list", "--help"]], ids=" ".join
)  # fmt: skip
def test_the_command_answers(arguments, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "thinwire.cli", *arguments], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) > 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["frobnicate"], "No such command 'frobnicate'"), (["list", "--json", "/nowhere/x.json"], "No such file")],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, says):
    run = subprocess.run(
        [sys.executable, "-m", "thinwire.cli", *arguments], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 2
    assert says in run.stderr and "Traceback" not in run.stderr
