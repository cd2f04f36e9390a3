"""The package says its types (py.typed), and says them all: a user's type checker need not guess."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import thinwire as tw

SOURCE = Path(tw.__file__).parents[1]
# What users do not import: the lab is a program of its own. Modules' handlers of missing frameworks bind a name.
OURS = ("thinwire.lab.", "thinwire.cli.", "thinwire.__main__.")
BOUND = ("thinwire.integrations.accelerate.error", "thinwire.integrations.transformers.error")


def test_the_package_is_typed():
    assert (SOURCE / "thinwire" / "py.typed").is_file()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_type_that_users_meet_is_declared(tmp_path):
    """By pyright's own measure; the checkout is given as a path, since an editable install is not seen by it."""
    paths = os.pathsep.join(map(str, (SOURCE, Path(torch.__file__).parents[1])))
    run = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", "thinwire", "--ignoreexternal", "--outputjson"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    symbols = json.loads(run.stdout)["typeCompleteness"]["symbols"]
    met = [symbol for symbol in symbols if not symbol["name"].startswith(OURS) and symbol["name"] not in BOUND]
    assert len(met) > 2000
    assert [each["name"] for each in met if not each["isTypeKnown"] or each["isTypeAmbiguous"]] == []
