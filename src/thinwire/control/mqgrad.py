"""mqgrad: a learner sets the level, after "MQGrad: Reinforcement Learning of Gradient Quantization in Parameter Server"
(Cui et al., 2018).

Known of the paper: a Markov decision process on a parameter server; the state is made of past losses, the action is
the number of bits of the next iterations. Reward, learner, bit set and interval are not public: what follows is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from thinwire.control.controller import Controller, Observation, check_interval, chosen
from thinwire.control.level_seconds import LevelSeconds
from thinwire.core import randomness

MOVES = (-1, 0, 1)  # one level fewer, the same, one more
KAPPA, TEMPERATURE = 0.15, 0.05  # to begin with; by trial, on one task
DROWNED = 10.0  # a level whose noise is so many times the signal is not for training
RISES = 3  # intervals in which the smoothed loss rises, one after the other: one level more


@dataclass
class MQGrad(Controller):
    """Decide after `interval` steps, then at ever longer ones, and learn from every decision while training goes on.

    1. State, of all n workers' gradients g_i, smoothed: S = avg (n <g_i, mean> - |g_i|^2) / (n - 1), the signal;
       v = avg |g_i|^2 - S, the gradient's own noise; for every level its error e, so |lost|^2 / |g|^2 of a message, and
       its seconds per step. With the mean as it was received: what its messages lost is right on average, and so is the
       product; of its square it would be a part, and at few bits the most. Under error feedback messages hold all of
       the signal, for what was late of it comes with what is new, and 1 - e of g_i's own noise, so that S = avg
       (n <g_i, mean> - (1 - e) |g_i|^2) / (n - 1 + e).
    2. A step under a level has noise N = v/n + e avg |g|^2 / n, and e |mean|^2 more where the mean comes back encoded,
       so that about 1 + kappa N/S times as many steps are needed: cost = seconds (1 + kappa N/S). Under error feedback
       what a message loses is no noise but comes later: N = v/n, and a message that holds a share 1 - e of what is
       owed makes e/(1 - e) more steps, its residual's square in squares of the gradient: cost = seconds (1 + kappa N/S
       + e/(1 - e)), and e/(1 - e) twice where the mean comes back encoded.
    3. Action: one level fewer, the same, or one more, drawn from softmax(-log cost / temperature). Single moves from
       the cheapest level on, because a try of a dear level costs seconds. Never to a level with e avg |g|^2 / n > 10 S;
       and one level more whenever the loss, smoothed, has risen for three intervals.
    4. Reward: r = d - a log(T / (T - s)), d the drop of log(loss) over the interval, s its seconds and T those of the
       run so far. Losses fall about as a power of time, T^-a, with a from the run so far: that much was due anyway.
       In units of its running spread, at most 2 either way, r is the advantage A.
    5. Policy gradient, with a trace since a level's effect on the loss outlasts its interval: for each of log kappa and
       log temperature, z = fade z + d log pi(action) / d parameter;  parameter += rate * A z.

    What a level's messages lose is measured at the level in use, and at the next ones in turn by a message that is
    not sent, and smoothed; where a scheme has none to spare, it follows from the levels that were measured, by a factor
    of 4 per bit (for other knobs: as 1/level). Under error feedback what is owed at the level in use is measured, and
    that of all workers' mean: what they owe each other delays nothing. Seconds are those of a line through all levels'
    steps, and off it as far as a level's own steps can tell (see `LevelSeconds`). Losses fall as a power of time, so
    intervals grow with the run: what changes is seen as soon, in parts of the run, and deciding, which takes two
    messages, costs ever less. Draws depend on `seed` and the number of the decision only; but seconds are the clock's,
    so that no two runs need decide alike.
    """

    levels_from: tuple[float, ...] | None = None  # None: the knob's whole menu
    interval: int = 10  # the first, in steps; lower => quicker decisions, from noisier rewards
    growth: float = 0.25  # of the run so far that an interval is, if that is more; 0: all intervals are alike
    rate: float = 0.03  # higher => learns sooner, from less evidence; 0: the rule as it starts
    policy: str | None = None  # a file that wire.save_controller() wrote, on every worker: start from what it learnt
    seed: int = 0  # of the draws

    needs_loss: ClassVar[bool] = True
    needs_noise: ClassVar[bool] = True
    summary: ClassVar[str] = "a policy-gradient learner: noise against signal, and seconds, move the level"

    def __post_init__(self) -> None:
        check_interval(self.interval, "mqgrad")
        for name in ("rate", "growth"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"mqgrad: {name} must not be negative, got {getattr(self, name)!r}")

    def menu(self, menu: Sequence[float]) -> tuple[float, ...]:
        return chosen(self.levels_from, menu, "mqgrad")

    def first(self, default: float, menu: Sequence[float]) -> float:
        return menu[0]

    def start(self, menu: Sequence[float]) -> None:
        super().start(menu)
        self._learnt = [math.log(KAPPA), math.log(TEMPERATURE)]
        self._trace = [0.0, 0.0]
        self._decisions = 0
        self._signal = self._square = math.nan  # S and avg |g|^2, smoothed
        self._errors: dict[float, float] = {}  # by level, as last measured
        self._seconds = LevelSeconds(self.levels)
        self._last: tuple[list[float], float] | None = None  # of the last decision: d log pi / d parameters, the loss
        self._at = 0  # the step of that decision
        self._due = 0  # the step of the next one that is known
        self._spent = [0.0, 0.0, 0.0, 0.0]  # seconds of the first interval, of the run; log(loss) fallen; spread of r
        self._loss = math.nan  # smoothed: that of one interval may rise by chance, three times and more
        self._rising = 0  # intervals, one after the other, in which it did
        self._relayed = self._owed = 0.0
        if self.policy is not None:
            self._learnt = self._carried(self.policy)

    def _carried(self, policy: str) -> list[float]:
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
        learnt = state.get("learnt")
        if not isinstance(learnt, list) or len(learnt) != 2 or not all(map(_finite, learnt)):
            raise ValueError(f"mqgrad: the policy {policy!r} holds no log kappa and log temperature")
        return [float(each) for each in learnt]

    @property
    def kappa(self) -> float:
        return math.exp(self._learnt[0])

    @property
    def temperature(self) -> float:
        return math.exp(self._learnt[1])

    def next_decision(self, step: int) -> int:
        """At multiples of the interval, each later than the one before by `growth` of it, and by one at least."""
        if step <= self._due:
            self._due = 0
        while self._due < step:
            self._due += self.interval * max(1, int(self.growth * (self._due // self.interval)))
        return self._due

    def wonders(self, level: float) -> float | None:
        """The next ones, to which it may go, in turn."""
        if level not in self.levels:
            return None
        place = self.levels.index(level)
        others = [*self.levels[max(0, place - 1) : place], *self.levels[place + 1 : place + 2]]
        return others[self._decisions % len(others)] if others else None

    def decide(self, seen: Observation) -> float:
        if seen.level not in self.levels:
            return self.levels[0]
        if not math.isfinite(seen.loss) or seen.loss <= 0:
            return seen.level
        self._take_note(seen)
        held, self._loss = self._loss, _smoothed(self._loss, seen.loss)
        self._rising = self._rising + 1 if self._loss > held else 0
        if self._last is not None:
            slopes, before = self._last
            self._learn(slopes, math.log(before / seen.loss), seen.seconds_per_step * (seen.step - self._at))
        place = self.levels.index(seen.level)
        moves = [move for move in MOVES if 0 <= place + move < len(self.levels)]
        if self._rising >= RISES and 1 in moves:
            moves, self._rising = [1], 0
        odds, slopes = self._policy([self.levels[place + move] for move in moves], seen.workers)
        draw = randomness.key(self.seed, self._decisions, "control.mqgrad") / 2**64
        action = next((at for at, edge in enumerate(_running(odds)) if draw < edge), len(moves) - 1)
        self._decisions += 1
        self._last, self._at = (slopes[action], seen.loss), seen.step
        return self.levels[place + moves[action]]

    def _take_note(self, seen: Observation) -> None:
        n, error = seen.workers, seen.compression_error
        self._relayed, self._owed = seen.relayed, seen.owed
        # Under feedback r = |owed|^2 / |g|^2 settles where a message loses as much as comes anew: r = e (1 + r).
        own = error / (1 + error) if seen.owed else error
        for level, found in ((seen.level, own), (seen.wondered_level, seen.wondered_error)):
            if level in self.levels and math.isfinite(found):
                self._errors[level] = _smoothed(self._errors.get(level, math.nan), found, _ERROR_NEWS)
        self._seconds.note(seen.level, seen.step - self._at, seen.seconds_per_step, seen.seconds_deviation)
        if math.isfinite(seen.given_square) and math.isfinite(seen.product) and n > 1:
            late = self._errors.get(seen.level, 0.0) if seen.owed else 0.0
            signal = (n * seen.product - (1 - late) * seen.given_square) / (n - 1 + late)
            self._square = _smoothed(self._square, seen.given_square)
            self._signal = _smoothed(self._signal, signal)

    def _policy(self, levels: Sequence[float], workers: int) -> tuple[list[float], list[list[float]]]:
        """pi over these levels to go to, and for each the slopes of its log by log kappa and by log temperature."""
        noise = [self._noise(each, workers) for each in levels]
        allowed = [each <= DROWNED for _, each in noise]
        if not any(allowed):  # all are drowned: the dearest there is
            allowed = [each == max(levels) for each in levels]
        scores, more = [], []
        for each, (whole, _) in zip(levels, noise, strict=True):
            steps = 1 + self.kappa * whole + self._delay(each)
            scores.append(-math.log(self._seconds.of(each) * steps) / self.temperature)
            more.append(-self.kappa * whole / steps / self.temperature)
        highest = max(score for score, may in zip(scores, allowed, strict=True) if may)
        raw = [math.exp(score - highest) if may else 0.0 for score, may in zip(scores, allowed, strict=True)]
        odds = [each / sum(raw) for each in raw]
        expected = [sum(p * each for p, each in zip(odds, values, strict=True)) for values in (more, scores)]
        return odds, [[a - expected[0], expected[1] - b] for a, b in zip(more, scores, strict=True)]

    def _noise(self, level: float, workers: int) -> tuple[float, float]:
        """(N / S, and the part of it that compression makes) under a level; (0, 0) while nothing is known."""
        if not math.isfinite(self._signal) or not self._square > 0:
            return 0.0, 0.0
        signal = max(self._signal, _FAINTEST * self._square)
        error = 0.0 if self._owed else self._error(level)
        made = error * self._square / workers / signal
        there = max(0.0, self._square - signal) / workers / signal + made
        return there + self._relayed * error * (1 + there), made

    def _delay(self, level: float) -> float:
        """Steps that feedback comes late under a level."""
        if not self._owed:
            return 0.0
        error = min(max(self._error(level), 0.0), _HARDLY_ANYTHING)
        return (1 + self._relayed) * error / (1 - error)

    def _error(self, level: float) -> float:
        """Measured, or from the nearest level that was."""
        if level in self._errors or not self._errors:
            return self._errors.get(level, 0.0)
        near = min(self._errors, key=lambda known: abs(math.log(known / level)))
        factor = 4.0 ** (near - level) if self.knob == "bits" else near / level
        error = self._errors[near]
        if self._owed and error < 1:  # what is owed, e/(1 - e), is that many times as much
            return factor * error / (1 - error + factor * error)
        return factor * error

    def _learn(self, slopes: Sequence[float], drop: float, seconds: float) -> None:
        first, run, fallen, spread = self._spent
        if not run:  # the first interval also held what starting takes: count it as long as the second
            first = run = seconds
        self._trace = [_TRACE * z + slope for z, slope in zip(self._trace, slopes, strict=True)]
        self._spent = [first, run + seconds, fallen + drop, spread]
        if not 0 < 2 * first <= run:
            return  # too early to tell how the loss falls
        exponent = max(0.0, fallen) / math.log(run / first)
        surplus = drop - exponent * math.log((run + seconds) / run)
        self._spent[3] = spread = _FADE * spread + (1 - _FADE) * abs(surplus) if spread else abs(surplus)
        if not spread:
            return
        advantage = max(-2.0, min(2.0, surplus / spread))
        for at, (low, high) in enumerate((_KAPPAS, _TEMPERATURES)):
            moved = self._learnt[at] + self.rate * advantage * self._trace[at]
            self._learnt[at] = min(max(moved, math.log(low)), math.log(high))

    def state_dict(self) -> dict[str, Any]:
        return {
            "levels": list(self.levels),
            "learnt": list(self._learnt),
            "trace": list(self._trace),
            "decisions": self._decisions,
            "noise": [self._signal, self._square],
            "errors": [list(each) for each in self._errors.items()],
            "seconds": self._seconds.state(),
            "last": None if self._last is None else [*self._last[0], self._last[1]],
            "at": self._at,
            "spent": list(self._spent),
            "loss": self._loss,
            "rising": self._rising,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["levels"] != list(self.levels):
            raise ValueError(f"mqgrad: the state is for {state['levels']}, not {list(self.levels)}")
        last = state["last"]
        learnt, trace, spent = ([float(each) for each in state[key]] for key in ("learnt", "trace", "spent"))
        if (len(learnt), len(trace), len(spent)) != (2, 2, 4):
            raise ValueError("mqgrad: the state is of another learner")
        self._learnt, self._trace, self._spent = learnt, trace, spent
        self._decisions, self._rising = int(state["decisions"]), int(state["rising"])
        self._signal, self._square = (float(each) for each in state["noise"])
        self._errors = {float(level): float(error) for level, error in state["errors"]}
        self._seconds.load(state["seconds"])
        self._last = None if last is None else ([float(last[0]), float(last[1])], float(last[2]))
        self._loss = float(state.get("loss", math.nan))
        self._at = int(state.get("at", self._decisions * self.interval))  # it was always that


def _smoothed(old: float, new: float, news: float | None = None) -> float:
    return new if not math.isfinite(old) else old + (_NEWS if news is None else news) * (new - old)


def _running(odds: Sequence[float]) -> list[float]:
    return [sum(odds[: at + 1]) for at in range(len(odds))]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


_NEWS = 0.3  # of an interval in what is smoothed; higher => follows sooner, with more noise
_ERROR_NEWS = 0.5  # the same of errors, which are measured in one step, and the next ones' in every other interval
_FADE = 0.9  # of past intervals in the spread: about the last ten count
_TRACE = 0.6  # of past decisions in the credit for a reward; higher => slower effects are seen, in more noise
_FAINTEST = 1e-3  # of avg |g|^2: a smaller signal cannot be told from none
_HARDLY_ANYTHING = 0.99  # lost, of what was to be sent: what is said of a level that loses more
_KAPPAS, _TEMPERATURES = (1e-3, 10.0), (5e-3, 1.0)  # within which it learns
