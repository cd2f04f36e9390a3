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

from thinwire import randomness
from thinwire.control.controller import Controller, Observation, check_interval, chosen

FEATURES = 5
_MEMORY = 0.8  # of the running mean and spread of rewards: about the last five decisions


@dataclass
class MQGrad(Controller):
    """Decide every `interval` steps, and learn from every decision while training goes on.

    1. State x: 1; how far the loss has come, log(first loss / loss); the slope and the bend of the last losses;
       the place of the level in use in the menu.
    2. Action: a level, drawn from the softmax policy pi = softmax(W x). Linear, because a run has few decisions.
    3. Reward r: the drop of log(loss) per second, interval against interval.
       Advantage A: r minus its running mean, in units of its running spread, at most 3.
    4. Policy gradient: W += rate * (A * grad log pi(action | x) + entropy * grad H(pi(x))).

    Draws depend on `seed` and the number of the decision only, so a resumed run decides alike.
    """

    levels_from: tuple[float, ...] | None = None  # None: the knob's whole menu
    interval: int = 10  # lower => quicker decisions, from noisier rewards
    rate: float = 0.3  # higher => commits sooner
    entropy: float = 0.02  # higher => keeps trying others for longer
    policy: str | None = None  # a file that wire.save_controller() wrote: start from what was learnt in that run
    seed: int = 0

    needs_loss: ClassVar[bool] = True
    summary: ClassVar[str] = "a policy-gradient learner: the loss's drop per second chooses the level"

    def __post_init__(self) -> None:
        check_interval(self.interval, "mqgrad")
        if not self.rate >= 0 or not self.entropy >= 0:
            raise ValueError(f"mqgrad: rate and entropy must not be negative, got {self.rate!r}, {self.entropy!r}")

    def menu(self, menu: Sequence[float]) -> tuple[float, ...]:
        return chosen(self.levels_from, menu, "mqgrad")

    def start(self, menu: Sequence[float]) -> None:
        super().start(menu)
        self._weights = torch.zeros(len(self.levels), FEATURES, dtype=torch.float64)
        self._decisions = 0
        self._first_loss = math.nan
        self._last: tuple[list[float], int, float] | None = None  # state, action, loss of the last decision
        self._mean, self._spread = 0.0, 0.0
        if self.policy is not None:
            learnt = torch.load(self.policy, weights_only=True)
            if learnt.get("levels") != list(self.levels):
                raise ValueError(
                    f"mqgrad: the policy {self.policy!r} chooses among {learnt.get('levels')}, not {list(self.levels)}"
                )
            self._weights = learnt["weights"].clone()

    def decide(self, seen: Observation) -> float:
        if not math.isfinite(seen.loss) or seen.loss <= 0:
            return seen.level  # nothing to learn from; the next interval may be better
        if math.isnan(self._first_loss):
            self._first_loss = seen.loss
        if self._last is not None:
            state, action, before = self._last
            self._learn(state, action, math.log(before / seen.loss) / max(seen.seconds_per_step * self.interval, 1e-9))
        state = self._state(seen)
        odds = self.odds(state)
        draw = randomness.key(self.seed, self._decisions, "control.mqgrad") / 2**64
        action = min(int((odds.cumsum(0) < draw).sum()), len(self.levels) - 1)
        self._decisions += 1
        self._last = (state, action, seen.loss)
        return self.levels[action]

    def odds(self, state: Sequence[float]) -> Tensor:
        """pi(. | state)."""
        return torch.softmax(self._weights @ torch.tensor(state, dtype=torch.float64), 0)

    def _state(self, seen: Observation) -> list[float]:
        logs = [math.log(loss) for loss in seen.losses if math.isfinite(loss) and loss > 0]
        drops = [a - b for a, b in pairwise(logs)]
        slope = sum(drops) / len(drops) if drops else 0.0
        late = sum(drops[-2:]) / 2 if len(drops) > 2 else slope
        place = self.levels.index(seen.level) / max(len(self.levels) - 1, 1) if seen.level in self.levels else 1.0
        return [
            1.0,
            math.log(self._first_loss / seen.loss),
            math.tanh(20 * slope),
            math.tanh(20 * (late - slope)),
            place,
        ]

    def _learn(self, state: Sequence[float], action: int, reward: float) -> None:
        if self._spread == 0.0:
            self._mean, self._spread = reward, abs(reward) or 1.0
        advantage = max(-3.0, min(3.0, (reward - self._mean) / self._spread))
        self._mean = _MEMORY * self._mean + (1 - _MEMORY) * reward
        self._spread = _MEMORY * self._spread + (1 - _MEMORY) * abs(reward - self._mean)

        x = torch.tensor(state, dtype=torch.float64)
        weights = self._weights.requires_grad_()
        log_odds = torch.log_softmax(weights @ x, 0)
        disorder = -(log_odds.exp() * log_odds).sum()
        (gradient,) = torch.autograd.grad(advantage * log_odds[action] + self.entropy * disorder, weights)
        self._weights = weights.detach() + self.rate * gradient

    def state_dict(self) -> dict[str, Any]:
        return {
            "levels": list(self.levels),
            "weights": self._weights,
            "decisions": self._decisions,
            "first_loss": self._first_loss,
            "last": None if self._last is None else list(self._last),
            "reward": [self._mean, self._spread],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["levels"] != list(self.levels):
            raise ValueError(f"mqgrad: the state chooses among {state['levels']}, not {list(self.levels)}")
        self._weights = state["weights"].clone()
        self._decisions = int(state["decisions"])
        self._first_loss = float(state["first_loss"])
        self._last = None if state["last"] is None else tuple(state["last"])  # type: ignore[assignment]
        self._mean, self._spread = (float(number) for number in state["reward"])
