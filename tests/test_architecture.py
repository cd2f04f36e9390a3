"""Imports run one way, the network stays in its places, files stay short, and tests stand alone."""

import ast
from pathlib import Path

import pytest

import thinwire

ROOT = Path(thinwire.__file__).parent
TESTS = Path(__file__).parent

# A module may import from its own layer and from those before it.
LAYERS = [
    {"kernels"},
    {"core"},
    {"schemes"},
    {"control"},
    {"exchange"},
    {"checkpoint", "plug", "reducer", "steering"},
    {"ddp", "front", "fsdp", "gossip", "local", "logs", "server", "units"},
    {"lab"},
    {"public"},
    {"__init__"},
    {"cli"},
    {"__main__"},
    {"integrations"},
]
NETWORK = {
    "exchange", "gossip", "plug", "reducer", "ddp", "front", "fsdp", "local", "server", "units", "lab", "integrations",
}  # fmt: skip


def modules():
    return sorted(ROOT.rglob("*.py"))


def area(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def imports(path):
    """Every module that a file imports, at whatever depth of the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name):
    found = [number for number, names in enumerate(LAYERS) if name in names]
    assert found, f"{name} is in no layer: add it where it belongs"
    return found[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    for name in imports(path):
        if name.startswith("thinwire."):
            target = name.split(".")[1]
            if (ROOT / target).is_dir() or (ROOT / f"{target}.py").exists():
                assert layer(target) <= layer(area(path)), f"{path.name} imports {name}, which lies above it"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_network_stays_in_its_places(path):
    if area(path) not in NETWORK:
        assert not [name for name in imports(path) if name.startswith("torch.distributed")]
        attributes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
        assert "torch.distributed" not in {ast.unparse(node) for node in attributes}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_others_sent_is_unpickled(path):
    """Files are loaded as tensors and plain values; only a process and its own children speak pickle."""
    if path.relative_to(ROOT) != Path("lab/runs/launch.py"):
        assert not {"pickle", "marshal", "shelve", "dill"} & set(imports(path))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(node)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    assert len(path.read_text().splitlines()) <= 400
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 70, node.name


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_imports_a_test(path):
    """What two tests need is in tests/helpers."""
    assert not [name for name in imports(path) if any(part.startswith("test_") for part in name.split("."))]


def test_no_two_test_files_have_one_name():
    """Pytest imports them by that name alone."""
    names = sorted(path.name for path in TESTS.rglob("test_*.py"))
    assert names == sorted(set(names))


# What PyTorch makes in its default dtype, on its default device, unless told otherwise; a script may change both.
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_tensors_are_made_in_a_stated_dtype_on_a_stated_device(path):
    """Only the lab, which is a program of its own, may rely on PyTorch's defaults."""
    if area(path) in ("exchange", "lab"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}:
            stated = {keyword.arg for keyword in node.keywords}
            assert {"dtype", "device"} <= stated, f"{path.name}:{node.lineno}: {ast.unparse(node)}"
