"""What CONTRIBUTING.md and docs/architecture.md say of the code is so: its files are there, the scheme runs."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire import schemes
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout

ROOT = Path(__file__).parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def in_the_tree():
    """Every path in the tree of docs/architecture.md, folders with a slash at the end."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## The tree\n")[1].split("\n## ")[0]
    paths, folders = [], []
    for indent, name in re.findall(r"^    ( *)(\S+)", section, re.MULTILINE):
        folders = [*folders[: len(indent) // 2], name]
        paths.append("".join(folders))
    return paths


def listed(folder):
    """(files, folders) that the tree has a line for, in a folder."""
    below = {path.removeprefix(folder) for path in in_the_tree() if path.startswith(folder)}
    names = {name for name in below if name and "/" not in name[:-1]}
    return {name for name in names if name[-1] != "/"}, {name for name in names if name[-1] == "/"}


def test_every_path_in_the_tree_exists():
    paths = in_the_tree()
    assert "src/thinwire/exchange/server/client.py" in paths and len(paths) == len(set(paths))
    for path in paths:
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path


@pytest.mark.parametrize("folder", [path for path in in_the_tree() if path.startswith("src/") and path[-1] == "/"])
def test_the_tree_leaves_nothing_out(folder):
    """A folder's line stands for all that is in it, or else every file, and every folder, in it has a line."""
    files, folders = listed(folder)
    if files:
        there = {path.name for path in (ROOT / folder).glob("*.py")}
        assert there - files <= {"__init__.py"}
    if folders:
        there = {f"{path.parent.name}/" for path in (ROOT / folder).glob("*/*.py")}
        assert there == folders
    if folder == "src/thinwire/":
        assert files and folders


def test_files_named_in_contributing_exist():
    """`qsgd.py` and the like may lie anywhere; paths are from the root, or from the package."""
    named = set(re.findall(r"`([\w/]+(?:\.py|\.cpp|\.md|/))`", CONTRIBUTING)) - {"src/thinwire/schemes/int8.py"}
    assert len(named) > 20
    for name in named:
        places = [ROOT / name, ROOT / "src" / "thinwire" / name]
        assert any(place.exists() for place in places) or ("/" not in name and [*ROOT.glob(f"src/**/{name}")]), name


@pytest.fixture
def scheme(tmp_path):
    """The class that CONTRIBUTING.md shows, registered as long as the test runs."""
    (block,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)
    (tmp_path / "int8.py").write_text(block)
    spec = importlib.util.spec_from_file_location("int8", tmp_path / "int8.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield tw.register(module.Int8)
    del schemes._registered["int8"]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("route", ["gather", "two-shot"])
def test_the_worked_scheme_gives_the_mean_back(scheme, route):
    assert tw.scheme("int8") == scheme()
    group = tw.Simulation("int8", workers=3, route=route)
    given = [{"w": numbers(30, 40, seed=i), "b": numbers(7, seed=i)} for i in range(3)]
    mean = group.reduce(given)
    for name in ("w", "b"):
        exact = sum(each[name] for each in given) / 3
        step = max(each[name].abs().max() for each in given) / 127
        assert mean[name].shape == exact.shape and (mean[name] - exact).abs().max() <= 1.01 * step
    assert group.bytes_sent < 3 * (30 * 40 + 7)


def test_the_worked_scheme_says_what_it_lost(scheme):
    codec, layout = scheme(), Layout.of([("w", (30, 40)), ("nothing", (0,)), ("zeros", (5,)), ("b", (7,))])
    flat = numbers(layout.numel)
    flat[1200:1205] = 0
    bucket = Bucket(flat.clone(), layout, lost=torch.full_like(flat, torch.nan))
    payload, decoded = codec.payload(bucket, codec.level), torch.zeros_like(flat)
    assert payload.numel() == codec.nbytes(layout, codec.level) == 4 * 4 + layout.numel
    codec.decode_add(payload, layout, codec.level, decoded, 1.0)
    assert torch.equal(bucket.lost, flat - decoded) and bucket.lost.count_nonzero() > 1000
    with pytest.raises(ValueError, match="int8: a payload of 1212 elements has 1228 bytes, got 1227"):
        codec.decode_add(payload[:-1], layout, codec.level, decoded, 1.0)


def test_the_worked_scheme_hides_no_inf_and_no_nan(scheme):
    for poison in (torch.inf, -torch.inf, torch.nan):
        group = tw.Simulation(scheme(), workers=2)
        bad = numbers(50)
        bad[3] = poison
        assert not torch.isfinite(group.reduce([bad, numbers(50, seed=1)])).all()
        assert torch.isfinite(group.reduce([numbers(50), numbers(50, seed=1)])).all()
