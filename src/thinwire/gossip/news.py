"""News: which connections broke, as every rank tells, and who must be dead if that is so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt


class News:
    """What one rank knows of everybody's connections: `told[who, whom]`, once `who` said it cannot reach `whom`.

    A rank that lives answers such a word: it cannot reach `who` either. So an answered word is of a broken connection
    between two that live, and one that nobody answers is of a death. An answer needs a round for every rank on its
    way: who is silent for as many rounds as there are ranks is counted dead, and is not, should an answer come later.
    It knows neither the graph nor the network.
    """

    def __init__(self, rank: int, ranks: int):
        self.rank: int = rank
        self.ranks: int = ranks
        self.nbytes: int = -(-ranks * ranks // 8)
        self.told: npt.NDArray[np.bool_] = np.zeros((ranks, ranks), dtype=bool)
        self._heard = np.zeros((ranks, ranks), dtype=np.int64)  # in which round
        self._round = 0

    def next_round(self) -> None:
        self._round += 1

    def add(self, whom: int) -> None:
        """This rank cannot reach `whom`."""
        told = self.told.copy()
        told[self.rank, whom] = True
        self._take(told)

    def message(self) -> bytes:
        """All of it, as it ends every message."""
        return np.packbits(self.told).tobytes()

    def read(self, rank: int, message: bytes) -> None:
        """Take in the end of a message of `rank`."""
        bits = np.unpackbits(np.frombuffer(message, dtype=np.uint8))
        told = bits[: self.ranks**2].astype(bool).reshape(self.ranks, self.ranks)
        if bits[self.ranks**2 :].any() or told.diagonal().any():
            raise ValueError(f"rank {rank} tells of connections that there are not: its message is not gossip's")
        self._take(told)

    @property
    def broken(self) -> set[int]:
        """The ranks that this one cannot reach, dead or not."""
        return _columns(self.told[[self.rank]])

    @property
    def links(self) -> set[tuple[int, int]]:
        """All broken connections, (lo, hi)."""
        lo, hi = np.nonzero(np.triu(self.told | self.told.T))
        return set(zip(lo.tolist(), hi.tolist(), strict=True))

    @property
    def missed(self) -> set[int]:
        """The others whom somebody cannot reach, dead or not."""
        return _columns(self.told) - {self.rank}

    @property
    def silent(self) -> set[int]:
        """The ranks that left a word unanswered, however short ago."""
        return _columns(self._unanswered)

    @property
    def dead(self) -> set[int]:
        old = self._round - self._heard >= self.ranks
        return _columns(self._unanswered & old)

    def believe(self) -> None:
        """Wait for no more answers to what is known now: everybody was asked."""
        self._heard[self._unanswered] = self._round - self.ranks

    def living(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.silent]

    @property
    def _unanswered(self) -> np.ndarray:
        return self.told & ~self.told.T

    def _take(self, told: np.ndarray) -> None:
        told = told | self.told
        told[self.rank] |= told[:, self.rank]  # the answer
        self._heard[told & ~self.told] = self._round
        self.told = told


def parents(members: Sequence[int], connected: Callable[[int, int], bool]) -> dict[int, int | None]:
    """A tree of the members, each with its parent: two children each, or more where connections are broken.

    Who cannot be reached from the first member is left out.
    """
    tree: dict[int, int | None] = {members[0]: None}
    children = dict.fromkeys(members, 0)
    waiting = list(members[1:])
    while waiting:
        free_first = sorted(tree, key=lambda parent: children[parent] >= 2)
        pairs = ((child, parent) for child in waiting for parent in free_first if connected(child, parent))
        child, parent = next(pairs, (None, None))
        if child is None or parent is None:
            break
        tree[child] = parent
        children[parent] += 1
        waiting.remove(child)
    return tree


def _columns(matrix: np.ndarray) -> set[int]:
    """Those with a True anywhere."""
    return set(np.nonzero(matrix)[1].tolist())
