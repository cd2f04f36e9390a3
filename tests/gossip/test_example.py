"""The example runs under torchrun, by the command its first lines give."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_gossip_example_trains_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run = subprocess.run(
        [*command, "examples/gossip.py", "--steps", "200"], capture_output=True, text=True, timeout=170, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert losses[1] < losses[0]
    assert float(re.search(r"right in ([\d.]+)% of cases", run.stdout)[1]) > 60  # guessing: 10
    assert int(re.search(r"(\d+) times less than exact", run.stdout)[1]) >= 20
