"""What workers tell each other beside gradients is JSON of bounded size, whatever the others say."""

import pickle

import pytest
import torch

from helpers.world import run_world
from thinwire.exchange import objects
from thinwire.lab.cost.model import BucketTrace, Message, Step, Turn


@pytest.fixture
def group(monkeypatch):
    """A group of two whose other rank says what `other` holds, with the size it claims."""
    other = {"size": 0, "raw": b""}

    def gathered(tensor, group):
        if tensor.dtype is torch.int64:
            return torch.tensor([int(tensor), other["size"]]), None
        theirs = torch.zeros_like(tensor)
        theirs[: len(other["raw"])] = torch.frombuffer(bytearray(other["raw"]), dtype=torch.uint8)
        return torch.cat([tensor, theirs]), None

    monkeypatch.setattr(objects, "_gathered", gathered)
    monkeypatch.setattr(objects, "device_of", lambda group, device=None: torch.device("cpu"))
    monkeypatch.setattr(objects, "_held", {})
    return other


@pytest.mark.parametrize("size", [1 << 40, -1, 0])
def test_a_size_out_of_bounds_is_refused_before_anything_is_allocated(group, size):
    group["size"] = size
    with pytest.raises(ValueError, match="at most 67108864 bytes"):
        objects.all_gather_objects("hello", None)


@pytest.mark.parametrize("raw", [pickle.dumps("hello"), b"[" * 100_000, b"\xff", b"nonsense"])
def test_what_is_no_json_is_refused(group, raw):
    group.update(size=len(raw), raw=raw)
    with pytest.raises(ValueError, match="what rank 1 says cannot be read"):
        objects.all_gather_objects("hello", None)


def _say():
    rank = torch.distributed.get_rank()
    return objects.all_gather_objects(
        {"rank": rank, "text": "ä" * rank, "many": [0.1, None]}, torch.distributed.group.WORLD
    )


def test_everybody_hears_everybody_in_rank_order():
    for heard in run_world(_say, 3):
        assert heard == [{"rank": rank, "text": "ä" * rank, "many": [0.1, None]} for rank in range(3)]


def test_a_step_is_the_same_after_its_way_as_lists():
    turns = (Turn(0.1, (Message("AllReduced float32", 3.0),)), Turn(0.2))
    step = Step(1.0, (BucketTrace(0.5, turns), BucketTrace(0.75, ())), plain=True)
    assert Step.of_lists(step.as_lists()) == step
