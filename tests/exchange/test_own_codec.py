"""A user's own codec over a server: registered on every rank it works, else who does not know it says what to do."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import mlp
from helpers.training import train
from helpers.world import run_world
from thinwire.core.scheme import Codec


@dataclass(frozen=True)
class Thirds(Codec):
    """Every entry to the nearest third, as one byte."""

    limit: int = 40

    unbiased: ClassVar[bool] = False
    grain: ClassVar[int] = 8
    summary: ClassVar[str] = "thirds"

    def nbytes(self, layout, level):
        return layout.numel

    def encode(self, bucket, level, out):
        codes = (bucket.flat * 3).round().clamp(-self.limit, self.limit)
        out.view(torch.int8).copy_(codes)
        if bucket.lost is not None:
            torch.sub(bucket.flat, codes / 3, out=bucket.lost)

    def decode_add(self, data, layout, level, out, weight):
        self.check_size(data, layout, level)
        out.add_(data.view(torch.int8).to(out.dtype) / 3, alpha=weight)


def _trained(registers):
    """Each worker's weights, or its error; `registers`: the ranks that do."""
    if torch.distributed.get_rank() in registers:
        tw.register(Thirds)
    role = tw.join(servers=1, timeout_seconds=20)
    if role.serves:
        try:
            return role.serve()["workers"]
        except RuntimeError as error:
            return str(error)
    model = DDP(mlp(), process_group=role.workers)
    try:
        with tw.attach(model, Thirds(limit=30), exchange=role.exchange):
            return train(model, 3)
    except (ValueError, RuntimeError) as error:
        role.exchange.close()
        return str(error)


def test_a_registered_codec_travels_as_spec_text():
    _, first, second = run_world(_trained, 3, (0, 1, 2))
    assert not isinstance(first, str), first
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_worker_that_did_not_register_it_hears_so_at_once():
    _, first, second = run_world(_trained, 3, (0,))
    assert "tw.register(Thirds)" in first and "tw.register(Thirds)" in second


def test_a_server_that_did_not_register_it_refuses_with_advice():
    _, first, second = run_world(_trained, 3, (1, 2))
    for said in (first, second):
        assert "'thirds' is not known here: tw.register() it on the ranks that serve, too" in said


def test_what_cannot_be_registered():
    with pytest.raises(ValueError, match="subclass of Scheme"):
        tw.register(int)
    with pytest.raises(ValueError, match=r"lacks converse"):

        @tw.register
        @dataclass(frozen=True)
        class Unfinished(tw.core.scheme.Scheme):
            pass

    with pytest.raises(ValueError, match=r"'qsgd' is taken by thinwire\.schemes\.qsgd\.QSGD"):
        tw.register(dataclass(frozen=True)(type("QSGD", (Thirds,), {})))
