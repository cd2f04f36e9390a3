"""Schedule: which part leaves at which attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinwire.core.scheme import Knob


@dataclass(frozen=True)
class Choice:
    """Lengths of a round for a controller to choose from; one that has no other beginning begins with the first."""

    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        return "every"

    @property
    def level(self) -> float:
        return float(self.lengths[0])

    @property
    def knob(self) -> Knob:
        return Knob("every", tuple(map(float, sorted(set(self.lengths), reverse=True))), self.level)


class Schedule:
    """Rounds of attempts; in each, every part leaves once, at equal distances, the last at the round's end.

    every: attempts of a round, or a function of the round's number.
    delay: attempts between a part's leaving and its landing; at most the distance of two parts, so that one is under
        way at a time.
    """

    def __init__(self, every: int | Callable[[int], int], parts: int, delay: int) -> None:
        self.every: int | Callable[[int], int] = every
        self.parts: int = parts
        self.delay: int = delay
        self.attempts: int = 0  # in all
        self.made: list[int] = [0] * parts  # since each part left last
        self.begin(0)

    def begin(self, round: int) -> None:
        """Start a round."""
        length = self.every(round) if callable(self.every) else self.every
        if not isinstance(length, int) or length < self.parts:
            raise ValueError(f"every must be an integer, at least 1 and at least parts, {self.parts}; got {length!r}")
        if not isinstance(self.delay, int) or not 0 <= self.delay <= length // self.parts:
            raise ValueError(f"delay must be 0 .. {length // self.parts}, every / parts, got {self.delay!r}")
        self.round: int = round
        self.length: int = length
        self.at: int = 0  # attempts of the round

    def attempt(self) -> list[int]:
        """Count one; the parts that leave now."""
        self.attempts += 1
        self.at += 1
        self.made = [made + 1 for made in self.made]
        due = [part for part in range(self.parts) if self.at == (part + 1) * self.length // self.parts]
        if self.at == self.length:
            self.begin(self.round + 1)
        return due

    def leave(self, part: int) -> int:
        """A part leaves; how many attempts its change is made of."""
        made, self.made[part] = self.made[part], 0
        return made

    @property
    def spec(self) -> str:
        return f"every {self.length}, {self.parts} parts, delay {self.delay}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "attempts": self.attempts, "made": list(self.made), "round": self.round, "at": self.at,
            "length": self.length,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin(int(state["round"]))
        self.length = int(state.get("length", self.length))  # of the round under way; what is chosen now is the next's
        self.attempts, self.at, self.made = int(state["attempts"]), int(state["at"]), list(state["made"])
