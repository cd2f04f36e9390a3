"""What is in a wheel, and that one from where nothing could be compiled runs on the references."""

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

from proof import wheel

(VERSION,) = re.findall(r'^version = "(.+)"', (wheel.ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """A wheel built with a compiler that fails, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", folder,
               "-C", f"build-dir={folder}/build", wheel.ROOT]  # fmt: skip
    run = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=170, env={**os.environ, "CXX": "/bin/false"}
    )
    assert run.returncode == 0, run.stderr
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as file:
        file.extractall(folder / "unpacked")
    return folder / "unpacked"


def beside(place, *arguments):
    """Python with the unpacked wheel and what else is installed, but nothing that leads imports to this checkout."""
    paths = os.pathsep.join(map(str, (place, Path(torch.__file__).parents[1])))
    return subprocess.run(
        [sys.executable, "-S", *arguments], cwd=place, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_wheel_has_all_that_is_read_and_nothing_more(references):
    there = {str(path.relative_to(references)) for path in references.rglob("*") if path.is_file()}
    package = {name for name in there if name.startswith("thinwire/")}
    source = wheel.ROOT / "src"
    ours = {str(path.relative_to(source)) for path in source.rglob("*.*") if path.is_file()}
    ours = {name for name in ours if not name.endswith((".pyc", ".so"))}
    assert package == ours | {"thinwire/kernels/_native.py"}
    assert "thinwire/py.typed" in package
    assert all(name.startswith(f"thinwire-{VERSION}.dist-info/") for name in there - package)
    assert (
        "thinwire = thinwire.__main__:main"
        in (references / f"thinwire-{VERSION}.dist-info/entry_points.txt").read_text()
    )


def test_the_version_stands_in_one_place():
    assert metadata.version("thinwire") == VERSION
    code = [*wheel.ROOT.glob("src/**/*.py"), *wheel.ROOT.glob("native/**/*.*"), wheel.ROOT / "Makefile"]
    pages = [*wheel.ROOT.glob("docs/**/*.md"), wheel.ROOT / "README.md", wheel.ROOT / "CONTRIBUTING.md"]  # no changelog
    assert len(code) > 100 and not [path for path in (*code, *pages) if VERSION in path.read_text()]


def test_without_a_compiler_the_command_says_so_and_the_references_work(references, tmp_path):
    run = beside(references, "-m", "thinwire", "doctor", "--json", str(tmp_path / "found.json"))
    assert run.returncode == 0, run.stderr
    found = {row["what"]: row["found"] for row in json.loads((tmp_path / "found.json").read_text())}
    assert found["kernels"] == "references only: no C++ compiler was found when thinwire was installed"
    assert found["thinwire"] == VERSION
    script = "import thinwire as tw, torch; g = tw.Simulation('qsgd(bits=4)', workers=2); "
    script += "print(tw.__file__, g.reduce([torch.ones(8), torch.ones(8)]).tolist() == [1.0] * 8)"
    run = beside(references, "-c", script)
    assert run.stdout.split() == [str(references / "thinwire" / "__init__.py"), "True"], run.stderr


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_sdist_and_wheel_are_built_and_tried_out(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "proof.wheel", "--out", str(tmp_path)], cwd=wheel.ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2 and names[1] == f"thinwire-{VERSION}.tar.gz"
    assert sys.platform != "linux" or re.search(r"-manylinux_\d+_\d+_", names[0])
    assert "native kernels" in run.stdout
