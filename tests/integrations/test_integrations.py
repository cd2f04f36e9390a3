"""Frameworks are imported only by those who ask for their adapter; who lacks one is told in a line what to install."""

import os
import subprocess
import sys

SCRIPT = """
import sys, warnings
import thinwire as tw
assert tw.log_to and tw.LocalSteps
frameworks = {"lightning", "pytorch_lightning", "accelerate", "transformers", "thinwire.integrations"}
assert not frameworks & set(sys.modules), frameworks & set(sys.modules)

for name in frameworks - {"thinwire.integrations"}:
    sys.modules[name] = None  # as if it were not installed
for name, package in (("lightning", "lightning"), ("accelerate", "accelerate"), ("transformers", "transformers")):
    try:
        __import__(f"thinwire.integrations.{name}")
    except ImportError as error:
        assert f"pip install {package}" in str(error) and "\\n" not in str(error), error
    else:
        raise AssertionError(name)

for name in frameworks:
    sys.modules.pop(name, None)
import torch
from transformers import Trainer, TrainingArguments
from thinwire.integrations.transformers import Thinwire

class Net(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).sum()}

data = [{"x": torch.ones(2)}] * 4
arguments = TrainingArguments(sys.argv[1], use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False)
try:
    Trainer(Net(2, 2), arguments, train_dataset=data, callbacks=[Thinwire("qsgd")]).train()
except ValueError as error:
    print(error)
"""


def test_frameworks_are_imported_when_asked_for_and_one_process_is_refused(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120, env=_alone()
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "Net is not under DDP or FSDP2 (1 processes), so nothing is sent: launch more than one process (torchrun)"
    ]


def _alone():
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
