"""A worker's conversations with nobody, before the first step: a device compiles its kernels while nobody waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.core.partition import Partition, like
from thinwire.core.parts import Piece
from thinwire.core.scheme import Scheme
from thinwire.exchange.collectives import AllReduced
from thinwire.exchange.exchange import Exchange


def rehearse(
    exchange: Exchange,
    scheme: Scheme,
    tensors: Mapping[str, Tensor],
    own: Sequence[Piece],
    exact: Collection[str],
    levels: Iterable[float],
    *,
    warmup_steps: int,
    seed: int,
) -> None:
    """Hold the conversations of this worker, as many as there are in its group, about zeros. Nothing is sent.

    One about each shape that there is, and one about two tensors; at every level that may come, in the first two steps
    and in those after the warm-up. What is compiled depends on nothing else.
    """
    one_of_each = {tuple(tensor.shape): name for name, tensor in tensors.items()}
    few = sorted(tensors, key=lambda name: tensors[name].numel())[:2]
    ledger, before = exchange.transport.ledger, exchange.transport.ledger.totals()
    for names in [*([name] for name in one_of_each.values()), few] if tensors else []:
        memory, scratch = Memory(), Scratch()
        pieces = [piece for piece in own if piece.whole in names]
        for piece in (piece for piece in pieces if piece.whole not in exact):
            kind = like(piece.like(tensors[piece.whole]), scheme, exchange.device)
            memory.add(piece.name, scheme.init(piece.name, kind, seed))
        whole = Partition(scheme, frozenset(piece.name for piece in pieces if piece.whole in exact))
        layout = Layout.of([(name, tuple(tensors[name].shape)) for name in names])
        flat = torch.zeros(layout.numel, dtype=tensors[names[0]].dtype, device=exchange.device)
        for level in levels:
            for step in sorted({0, 1, warmup_steps, warmup_steps + 1}):
                who = exchange.workers, exchange.worker, step, seed
                bucket = Bucket(flat.zero_(), layout, *who, None, scratch, seat=exchange.place)
                _alone(exchange, bucket, whole, memory, level)
    ledger.load(before)


def _alone(exchange: Exchange, bucket: Bucket, scheme: Partition, memory: Memory, level: float) -> None:
    for wanted in exchange.hold(bucket, lambda part: scheme.converse(part, memory, level)):
        for collective in wanted:
            if not isinstance(collective, AllReduced):  # whose own numbers are there
                collective.out.zero_()  # type: ignore[attr-defined]
