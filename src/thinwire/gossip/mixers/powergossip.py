"""PowerGossip: power iteration on the difference between neighbours (Vogels, Karimireddy and Jaggi, 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import randomness
from thinwire.core.layout import Segment
from thinwire.core.memory import Memory
from thinwire.gossip.mixer import Mixer, Mixing, as_bytes, as_values
from thinwire.gossip.node import Node
from thinwire.schemes import _products


@dataclass(frozen=True)
class PowerGossip(Mixer):
    """Neighbours find the largest directions of D = X_hi - X_lo, which neither sees, and step along them.

    Per edge (lo < hi) and matrix both ends keep the same P (rows x r) and Q (cols x r). One iteration:
    1. odd:  Q = orth(Q); each end sends X Q;   P = X_hi Q - X_lo Q.
       even: P = orth(P); each end sends X'P;   Q = X_hi'P - X_lo'P.
    2. X_hi -= step w P Q', X_lo += step w P Q'; all edges of a node use the X from before the iteration.
    Tensors of fewer than two dimensions are averaged exactly, once per step, in the first message.

    Both ends do the same subtraction on the same bytes, so P and Q stay bit-identical without being sent.

    Differs from the paper: a column of P or Q that vanished (the replicas agreed) is drawn again from the
    randomness both ends share; power iteration could not leave zero by itself.
    """

    factor_rank: int = 1  # higher => more bytes, faster consensus; more than a matrix has is cut to what it has
    iterations: int = 1  # messages per step, one after the other: s at rank 1 act like rank s at s times the latency
    warm: bool = True  # False: draw the directions anew every time instead of refining the last ones
    step: float = 1.0  # 1 needs no tuning; the graph's best_step is the fastest for plain averaging

    summary: ClassVar[str] = "rank-r differences by power iteration: few bytes, no error feedback, nothing to tune"

    def __post_init__(self) -> None:
        for option in ("factor_rank", "iterations"):
            value = getattr(self, option)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"powergossip: {option} must be a whole number, at least 1, got {value!r}")
        if not 0 < self.step < 2:
            raise ValueError(f"powergossip: step must be between 0 and 2, got {self.step!r}")

    def meet(self, node: Node, neighbour: int) -> dict[str, dict[str, Tensor]]:
        met = {}
        for matrix in self._matrices(node):
            met[matrix.name] = {side: self._draw(node, neighbour, matrix, side, round=0) for side in ("left", "right")}
        return met

    def mix(self, node: Node, weights: Mapping[int, float]) -> Mixing:
        edges = list(weights)
        for iteration in range(self.iterations):
            said = {j: self._say(node, j, vectors=iteration == 0) for j in edges}
            answers = yield {j: as_bytes(values) for j, values in said.items()}
            edges = [j for j in edges if j in answers]
            for j in edges:
                theirs = as_values(answers[j], said[j])
                if kernels.all_finite(said[j]) and kernels.all_finite(theirs):
                    self._hear(node, j, said[j], theirs, weights[j], vectors=iteration == 0)
                node.rounds[j] += 1

    def _say(self, node: Node, neighbour: int, *, vectors: bool) -> Tensor:
        """The message: in the first iteration the vectors, then each matrix times its directions."""
        memory, known, _ = self._sides(node, neighbour)
        pieces = [node.flat[s.start : s.stop] for s in node.layout.segments if vectors and len(s.shape) < 2]
        for matrix in self._matrices(node):
            if self.warm:
                directions = self._alive(node, neighbour, matrix, memory[matrix.name, known], known)
            else:
                directions = self._draw(node, neighbour, matrix, known, node.rounds[neighbour])
            memory[matrix.name, known] = directions = _orthonormal(directions)
            x = node.views[matrix.name].view(matrix.shape[0], -1)
            pieces.append(_product(x, directions, known).t().reshape(-1))
        message = node.scratch.take(f"to {neighbour}", sum(p.numel() for p in pieces), node.flat.dtype)
        return torch.cat(pieces, out=message) if pieces else message

    def _hear(self, node: Node, neighbour: int, mine: Tensor, theirs: Tensor, weight: float, *, vectors: bool) -> None:
        """Subtract, hi minus lo, and step along what came out."""
        memory, known, found = self._sides(node, neighbour)
        is_high = node.number > neighbour
        difference = mine - theirs if is_high else theirs - mine
        toward = -weight if is_high else weight
        start = 0
        for s in (s for s in node.layout.segments if vectors and len(s.shape) < 2):
            node.flat[s.start : s.stop].add_(difference[start : start + s.numel], alpha=toward)
            start += s.numel
        for matrix in self._matrices(node):
            directions = memory[matrix.name, known]
            size = self._length(matrix, found) * directions.shape[1]
            memory[matrix.name, found] = difference[start : start + size].view(-1, directions.shape[1])
            left, right = memory[matrix.name, "left"], memory[matrix.name, "right"]
            x = node.views[matrix.name].view(matrix.shape[0], -1)
            x.addmm_(left, right.t(), alpha=self.step * toward)
            start += size

    def _sides(self, node: Node, neighbour: int) -> tuple[Memory, str, str]:
        """The edge's memory, the side whose directions are known, and the side that this iteration finds."""
        is_odd = node.rounds[neighbour] % 2 == 0  # the first iteration has number 1
        known, found = ("right", "left") if is_odd else ("left", "right")
        return node.edge(neighbour), known, found

    def _alive(self, node: Node, neighbour: int, matrix: Segment, directions: Tensor, side: str) -> Tensor:
        dead = directions.abs().amax(0) == 0
        if not bool(dead.any()):
            return directions
        return torch.where(dead, self._draw(node, neighbour, matrix, side, node.rounds[neighbour]), directions)

    def _draw(self, node: Node, neighbour: int, matrix: Segment, side: str, round: int) -> Tensor:
        """N(0, 1), the same at both ends of the edge."""
        lo, hi = sorted((node.number, neighbour))
        key = randomness.key(node.seed, round, f"{matrix.name}/{side}/{lo}-{hi}")
        generator = torch.Generator("cpu").manual_seed(key & (2**63 - 1))
        columns = min(self.factor_rank, self._length(matrix, "left"), self._length(matrix, "right"))
        shape = (self._length(matrix, side), columns)
        return torch.randn(shape, dtype=node.flat.dtype, device="cpu", generator=generator)

    @staticmethod
    def _matrices(node: Node) -> Iterator[Segment]:
        return (s for s in node.layout.segments if len(s.shape) > 1 and s.numel)

    @staticmethod
    def _length(matrix: Segment, side: str) -> int:
        return matrix.shape[0] if side == "left" else matrix.numel // matrix.shape[0]


def _product(x: Tensor, directions: Tensor, known: str) -> Tensor:
    """(rank, size): X times the directions, or X^T times them. Both read X row by row."""
    basis = directions.t().contiguous()
    times = _products.times_rows if known == "right" else _products.times_columns
    out = torch.empty((len(basis), x.shape[0 if known == "right" else 1]), dtype=x.dtype, device=x.device)
    times(x[None], basis[None], out[None])
    return out


def _orthonormal(directions: Tensor) -> Tensor:
    """An orthonormal basis of the columns, none of them zero. Scaled first: tiny elements have no squares."""
    scaled = directions / directions.abs().amax(0)
    if scaled.shape[1] == 1:
        return scaled / torch.linalg.vector_norm(scaled)
    return torch.linalg.qr(scaled).Q
