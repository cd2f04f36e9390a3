"""The examples in docstrings run, in a group of one process."""

import doctest
import importlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.core.bucket import Bucket
from thinwire.core.request import Sum
from thinwire.core.scheme import Scheme

ROOT = Path(tw.__file__).parent
# What examples need not import.
GIVEN = {"tw": tw, "torch": torch, "dataclass": dataclass, "Bucket": Bucket, "Scheme": Scheme, "Sum": Sum}


def examples():
    """Every docstring of the package with an example in it."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if ">>> " in path.read_text():
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
            tests = doctest.DocTestFinder(exclude_empty=True).find(module, globs=GIVEN)
            found += [test for test in tests if test.examples]
    return found


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    torch.manual_seed(0)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_the_example_does_what_it_shows(example, alone):
    said = []
    failed = doctest.DocTestRunner(verbose=False).run(example, out=said.append, clear_globs=False).failed
    assert not failed, "".join(said)


def test_what_a_newcomer_looks_up_first_has_an_example():
    names = {example.name.rpartition(".")[2] for example in examples()}
    assert names >= {"attach", "Simulation", "Gossip", "Scheme", "Codec"}
