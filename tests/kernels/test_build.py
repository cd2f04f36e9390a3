"""Where the kernels cannot be compiled, the build goes on without them and leaves the reason."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.skipif(CMAKE is None or COMPILER is None, reason="needs cmake and a C++ compiler")


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("exit 1", "no C++ compiler was found"), (f'exec {COMPILER} "$@" -std=c++11', "lacks C++20")],
    ids=["broken", "old"],
)
def test_a_compiler_that_cannot_do_it(compiler, why, tmp_path):
    fake = tmp_path / "compiler"
    fake.write_text(f"#!/bin/sh\n{compiler}\n")
    fake.chmod(0o755)
    command = [CMAKE, "-S", NATIVE, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "CXX": str(fake)})
    assert ended.returncode == 0, ended.stderr
    assert "without its compiled kernels" in ended.stderr
    stub = [sys.executable, tmp_path / "build" / "_native.py"]
    left = subprocess.run(stub, capture_output=True, text=True, timeout=20)
    assert left.returncode != 0 and "ImportError" in left.stderr and why in left.stderr
