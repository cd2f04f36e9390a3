"""mqgrad: a learner sets the level, after "MQGrad: Reinforcement Learning of Gradient Quantization in Parameter Server"
(Cui et al., 2018).

Known of the paper: a Markov decision process on a parameter server; the state is made of past losses, the action is
the number of bits of the next iterations. Reward, learner, bit set and interval are not public: what follows is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.control.controller import Controller, Observation, check_interval, chosen
from thinwire.core import randomness

MOVES = (-1, 0, 1)  # one level fewer, the same, one more
FEATURES = 4


@dataclass
class MQGrad(Controller):
    """Decide every `interval` steps, and learn from every decision while training goes on.

    1. State x: 1; the slope of the last losses (drop of log(loss) per interval, squashed); how far the loss has come,
       log(first loss / loss); the decades of the compression error, log10(|lost|^2 / |gradient|^2), within -4..1.
    2. Action: one level fewer, the same, or one more, drawn from the softmax policy pi = softmax(W x). Linear, because
       a run has few decisions; single moves from the cheapest level on, because a try of a dear level costs seconds.
    3. Reward: r = d - a log(T / (T - s)), d the drop of log(loss) over the interval, s its seconds and T those of the
       run so far. Losses fall about as a power of time, T^-a, with a from the run so far: that much was due anyway.
       In units of its running spread, at most 2 either way, r is the advantage A.
    4. Policy gradient with a trace, since a level's effect on the loss outlasts the interval it was chosen for:
       z = fade z + grad log pi(action | x);  W += rate * (A z + entropy * grad H(pi(x))).

    It starts from a policy that mostly stays: up when the loss has come far and hardly falls while messages lose much,
    down when they lose next to nothing. Draws depend on `seed` and the number of the decision only, so a resumed run
    decides alike.
    """

    levels_from: tuple[float, ...] | None = None  # None: the knob's whole menu
    interval: int = 10  # lower => quicker decisions, from noisier rewards
    rate: float = 0.03  # higher => learns sooner, from less evidence
    entropy: float = 0.01  # higher => keeps trying for longer
    policy: str | None = None  # a file that wire.save_controller() wrote, on every worker: start from what it learnt
    seed: int = 0

    needs_loss: ClassVar[bool] = True
    summary: ClassVar[str] = "a policy-gradient learner: the loss's drop for its seconds moves the level"

    def __post_init__(self) -> None:
        check_interval(self.interval, "mqgrad")
        if not self.rate >= 0 or not self.entropy >= 0:
            raise ValueError(f"mqgrad: rate and entropy must not be negative, got {self.rate!r}, {self.entropy!r}")

    def menu(self, menu: Sequence[float]) -> tuple[float, ...]:
        return chosen(self.levels_from, menu, "mqgrad")

    def first(self, default: float, menu: Sequence[float]) -> float:
        return menu[0]

    def start(self, menu: Sequence[float]) -> None:
        super().start(menu)
        self._weights = _PRIOR.clone()
        self._decisions = 0
        self._first_loss = math.nan
        self._last: tuple[list[float], int, float] | None = None  # state, action, loss of the last decision
        self._trace = torch.zeros_like(self._weights)
        self._first_seconds = self._seconds = 0.0  # of the first interval, of the run so far
        self._fallen = 0.0  # log(loss), since the first decision
        self._spread = 0.0
        if self.policy is not None:
            self._weights = self._learnt(self.policy)

    def _learnt(self, policy: str) -> Tensor:
        """Of the run that wrote this file; every worker reads its own."""
        try:
            state = torch.load(policy, weights_only=True)
        except Exception as error:  # a file that is none raises whatever it meets
            raise ValueError(
                f"mqgrad: the policy {policy!r} cannot be read: {str(error).partition(chr(10))[0]}"
            ) from error
        if not isinstance(state, dict) or state.get("levels") != list(self.levels):
            found = state.get("levels") if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"mqgrad: the policy {policy!r} is for {found}, not {list(self.levels)}")
        weights = state.get("weights")
        if not isinstance(weights, Tensor) or weights.shape != _PRIOR.shape or weights.dtype != _PRIOR.dtype:
            raise ValueError(f"mqgrad: the policy {policy!r} holds no weights of {tuple(_PRIOR.shape)}")
        return weights.clone()

    def decide(self, seen: Observation) -> float:
        if not math.isfinite(seen.loss) or seen.loss <= 0 or seen.level not in self.levels:
            return self.levels[0] if seen.level not in self.levels else seen.level
        if self._last is None:
            self._first_loss = seen.loss
        else:
            state, action, before = self._last
            self._learn(state, action, math.log(before / seen.loss), seen.seconds_per_step * self.interval)
        state, place = self._state(seen), self.levels.index(seen.level)
        draw = randomness.key(self.seed, self._decisions, "control.mqgrad") / 2**64
        action = min(int((self.odds(state).cumsum(0) < draw).sum()), len(MOVES) - 1)
        self._decisions += 1
        self._last = (state, action, seen.loss)
        return self.levels[min(max(place + MOVES[action], 0), len(self.levels) - 1)]

    def odds(self, state: Sequence[float]) -> Tensor:
        """pi(. | state), over the moves."""
        return torch.softmax(self._weights @ torch.tensor(state, dtype=torch.float64, device="cpu"), 0)

    def _state(self, seen: Observation) -> list[float]:
        logs = [math.log(loss) for loss in seen.losses[-4:] if math.isfinite(loss) and loss > 0]
        drops = [a - b for a, b in pairwise(logs)]
        slope = sum(drops) / len(drops) if drops else 1.0
        error = seen.compression_error if math.isfinite(seen.compression_error) else 0.1
        decades = min(1.0, max(-4.0, math.log10(max(error, 1e-9))))
        return [1.0, math.tanh(10 * slope), math.log(self._first_loss / seen.loss), decades]

    def _learn(self, state: Sequence[float], action: int, drop: float, seconds: float) -> None:
        if not self._seconds:  # the first interval also held what starting takes: count it as long as the second
            self._first_seconds = self._seconds = seconds
        fallen, before = self._fallen, self._seconds
        self._fallen, self._seconds = fallen + drop, before + seconds
        inputs = torch.tensor(state, dtype=torch.float64, device="cpu")
        log_odds = torch.log_softmax(self._weights @ inputs, 0)
        odds = log_odds.exp()
        taken = torch.zeros_like(odds)
        taken[action] = 1
        self._trace = _TRACE * self._trace + torch.outer(taken - odds, inputs)
        if not 0 < 2 * self._first_seconds <= before:
            return  # too early to tell how the loss falls
        exponent = max(0.0, fallen) / math.log(before / self._first_seconds)
        surplus = drop - exponent * math.log(self._seconds / before)
        self._spread = _FADE * self._spread + (1 - _FADE) * abs(surplus) if self._spread else abs(surplus)
        if not self._spread:
            return
        advantage = max(-2.0, min(2.0, surplus / self._spread))
        more_disorder = -odds * (log_odds - (odds * log_odds).sum())  # the gradient of the entropy by the logits
        self._weights = self._weights + self.rate * (
            advantage * self._trace + self.entropy * torch.outer(more_disorder, inputs)
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "levels": list(self.levels),
            "weights": self._weights,
            "decisions": self._decisions,
            "first_loss": self._first_loss,
            "last": None if self._last is None else list(self._last),
            "trace": self._trace,
            "reward": [self._first_seconds, self._seconds, self._fallen, self._spread],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["levels"] != list(self.levels):
            raise ValueError(f"mqgrad: the state is for {state['levels']}, not {list(self.levels)}")
        self._weights = state["weights"].clone()
        self._decisions = int(state["decisions"])
        self._first_loss = float(state["first_loss"])
        self._last = None if state["last"] is None else tuple(state["last"])  # type: ignore[assignment]
        self._trace = state["trace"].clone()
        self._first_seconds, self._seconds, self._fallen, self._spread = (float(number) for number in state["reward"])


_FADE = 0.9  # of past intervals in the spread: about the last ten count
_TRACE = 0.6  # of past decisions in the credit for a reward; higher => slower effects are seen, in more noise
# Logits of one fewer, the same, one more: for 1, slope, progress, decades of error.
_PRIOR = torch.tensor(
    [[-4.0, 0.0, -1.0, -1.6], [1.0, 0.0, 0.0, 0.0], [-0.5, -3.0, 1.0, 2.0]], dtype=torch.float64, device="cpu"
)
