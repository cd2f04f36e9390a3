"""Training under every mixer: peers with steps chosen on a seed of their own, differences evaluated seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any, ClassVar, Protocol, TypeVar

from thinwire.gossip import graphs
from thinwire.lab.report import intervals
from thinwire.lab.report.intervals import Interval
from thinwire.lab.repro.claims import PAPER, Claim, Listing, Progress, Stoppable
from thinwire.lab.repro.powergossip.equal_bytes import GRID
from thinwire.lab.repro.powergossip.training import GossipRun
from thinwire.lab.runs import launch
from thinwire.lab.runs.curves import KEPT_POINTS
from thinwire.lab.tasks.datasets import Dataset

Detail = TypeVar("Detail", str, int)

TUNING_SEED = 1000  # none of the seeds that count
EXACT = {"all-reduce": None, "D-PSGD": "dpsgd"}
POWER = {
    "PowerGossip, rank 1": "powergossip(step={})",
    "PowerGossip, rank 1, 2 iterations": "powergossip(iterations=2, step={})",
}
CHOCO_SIGN, CHOCO_TOP, SQUEEZE = "CHOCO, sign", "CHOCO, top 1%", "DeepSqueeze, sign"
SPECS = {
    CHOCO_SIGN: "choco(codec='signsgd', step={})",
    CHOCO_TOP: "choco(codec='topk(density=0.01)', step={})",
    SQUEEZE: "deepsqueeze(codec='signsgd', step={})",
}


class Trained(Protocol):
    """What is trained, but for the mixer and the seed."""

    title: ClassVar[str]
    rates: ClassVar[tuple[float, ...]]  # what D-PSGD's may be chosen from, times the training's own

    @property
    def dataset(self) -> Dataset: ...
    @property
    def graph(self) -> graphs.Graph: ...
    @property
    def steps(self) -> int: ...
    @property
    def skew(self) -> float: ...

    def run(self, mixer: str | None, seed: int, rate: float = 1.0) -> GossipRun: ...


@dataclass(frozen=True)
class Setting:
    """A peer's step and its learning rate, times D-PSGD's."""

    step: float
    rate: float = 1.0

    def __str__(self) -> str:
        return f"step {self.step:g}" + (f", rate {self.rate:g}x" if self.rate != 1 else "")


@dataclass(frozen=True)
class Peer:
    """What a tuned peer may choose from; `plain`: it is also run untuned, with PowerGossip's own step and rate."""

    settings: tuple[Setting, ...] = ()
    plain: bool = True


Peers = Mapping[str, Peer]


def untuned() -> Peers:
    return {name: Peer() for name in SPECS}


def tuned() -> Peers:
    """Each step over the full number of steps, for one that is fine at first may diverge late."""
    return {name: Peer(tuple(map(Setting, GRID[:-1]))) for name in SPECS}


def of_the_authors() -> Peers:
    """What the authors had tuned their peers to, and what suits them better here."""
    signs = tuple(Setting(step, rate) for step in (0.45, 1.0) for rate in (1.0, 1.4))
    return {
        CHOCO_SIGN: Peer(signs, plain=False),
        CHOCO_TOP: Peer((Setting(0.0375), Setting(0.1)), plain=False),
        SQUEEZE: Peer((Setting(0.01), Setting(0.1)), plain=False),
    }


Method = tuple[str | None, float]  # a mixer, None for all-reduce, and its rate


@dataclass
class Study:
    """Runs, as far as they are made; several at once, for none knows of another."""

    training: Trained
    progress: Progress
    processes: int | None = None  # None: one for each core
    settings: dict[str, dict[str, Method]] = field(default_factory=dict)  # to choose from
    trials: dict[tuple[str, str], GossipRun] = field(default_factory=dict)  # by name and setting
    methods: dict[str, Method] = field(default_factory=dict)  # to compare
    runs: dict[tuple[str, int], GossipRun] = field(default_factory=dict)  # by name and seed

    @property
    def shards(self) -> str:
        return "label-skewed shards" if self.training.skew else "i.i.d. shards"

    @property
    def untuned(self) -> float:
        """The step that suits exact gossip best on this graph."""
        return round(self.training.graph.best_step, 3)

    @property
    def tried(self) -> dict[str, dict[str, GossipRun]]:
        found: dict[str, dict[str, GossipRun]] = {}
        for name, settings in self.settings.items():
            for text in settings:
                if (name, text) in self.trials:
                    found.setdefault(name, {})[text] = self.trials[name, text]
        return found

    @property
    def found(self) -> dict[str, list[GossipRun]]:
        """From the first seed up to one that was not finished, so that the same seeds are compared."""
        found: dict[str, list[GossipRun]] = {}
        for name in self.methods:
            while run := self.runs.get((name, len(found.get(name, ())))):
                found.setdefault(name, []).append(run)
        return found

    def choose(self, peers: Peers) -> None:
        """Everybody's setting, on a seed that does not count; D-PSGD's rate first, for it is everybody's."""
        rates: dict[str, Method] = {f"rate {rate:g}x": ("dpsgd", rate) for rate in self.training.rates}
        self._try({"D-PSGD": rates})
        _, rate = rates[self._best("D-PSGD")]
        self.methods |= {name: (mixer, rate) for name, mixer in EXACT.items()}
        self.methods |= {name: (spec.format(self.untuned), rate) for name, spec in POWER.items()}
        self._try(
            {
                name: {str(each): (SPECS[name].format(each.step), rate * each.rate) for each in peer.settings}
                for name, peer in peers.items()
            }
        )
        for name, peer in peers.items():
            if peer.plain:
                self.methods[f"{name}, untuned ({Setting(self.untuned)})"] = SPECS[name].format(self.untuned), rate
            if peer.settings:
                chosen = self._best(name)
                self.methods[f"{name}, tuned ({chosen})"] = self.settings[name][chosen]

    def _try(self, settings: Mapping[str, dict[str, Method]]) -> None:
        """All of them; who has but one has nothing to choose."""
        self.settings |= settings
        jobs = {
            (name, text): (mixer, TUNING_SEED, rate)
            for name, each in settings.items()
            for text, (mixer, rate) in each.items()
            if len(each) > 1
        }
        self._carry_out(jobs, self.trials, lambda name, text: f"tuning {name}, {text}")

    def _best(self, name: str) -> str:
        tried = self.tried.get(name)
        return max(tried, key=lambda text: tried[text].accuracy) if tried else next(iter(self.settings[name]))

    def judge(self, seeds: int) -> None:
        """Every method once, then the next seed, so that what is stopped early has the same seeds of all."""
        jobs = {
            (name, seed): (mixer, seed, rate) for seed in range(seeds) for name, (mixer, rate) in self.methods.items()
        }
        self._carry_out(jobs, self.runs, lambda name, seed: f"{name}, seed {seed}")

    def _carry_out(
        self,
        jobs: dict[tuple[str, Detail], tuple[str | None, int, float]],
        into: dict[tuple[str, Detail], GossipRun],
        title: Callable[[str, Detail], str],
    ) -> None:
        where, keys = f"training, {self.training.title}, {self.shards}", list(jobs)

        def note(number: int, run: GossipRun) -> None:
            into[keys[number]] = run
            done = sum(key in into for key in keys)
            self.progress(f"{where}: {title(*keys[number])}: {_percent([run])}%, {done} of {len(keys)}")

        if jobs:
            self.progress(f"{where}: {title(*keys[0])}, and {len(keys) - 1} more")
        launch.share_out(self.training.run, list(jobs.values()), note, processes=self.processes)

    def ahead(self, ours: str, theirs: str) -> Interval:
        """Points of accuracy, by the seeds that both have."""
        pairs = list(zip(self.found[ours], self.found[theirs], strict=False))
        return intervals.paired([a.accuracy for a, _ in pairs], [b.accuracy for _, b in pairs])


def tables(
    training: Trained, peers: Peers, seeds: int, claims: list[Claim], progress: Progress, stop: Stoppable,
    processes: int | None = None,
) -> list[Listing]:  # fmt: skip
    """How every mixer trains and, where settings were to be chosen, how they were."""
    study = Study(training, progress, processes)
    with stop:
        study.choose(peers)
        study.judge(seeds)
    claims += claims_of(study)
    done = max(map(len, study.found.values()), default=0)
    where = f"{training.title}, 8-ring, {study.shards}, {training.steps} steps"
    found = [
        Listing(
            f"{where}, {done} seeds, {len(training.dataset.test):,} test images; PowerGossip's step {study.untuned:g}",
            ["method", "accuracy %", "spread", "points against D-PSGD", "bytes per worker and step"],
            [[name, *_summary(study, name)] for name in study.found],
        )
    ]
    for name, tried in study.tried.items():
        cells = [_percent([run]) for run in tried.values()]
        found.append(Listing(f"{name}, chosen on seed {TUNING_SEED}: accuracy %", list(tried), [cells]))
    return found


def claims_of(study: Study) -> list[Claim]:
    """On par with exact gossip and with tuned peers, and ahead of untuned ones."""
    claims = []
    for power in POWER:
        for name in study.found:
            if power in study.found and name not in (*POWER, "all-reduce"):
                claim = _beats if "untuned" in name else _on_par
                claims.append(claim(power, name, study))
    return claims


def _summary(study: Study, name: str) -> list[Any]:
    runs = study.found[name]
    accuracies = [run.accuracy for run in runs]
    return [
        _percent(runs),
        f"{stdev(accuracies):.2f}" if len(runs) > 1 else "",
        study.ahead(name, "D-PSGD").text("+.2f") if "D-PSGD" in study.found and name != "D-PSGD" else "",
        f"{mean(run.bytes_per_step for run in runs):,.0f}",
    ]


def _percent(runs: list[GossipRun]) -> str:
    """The mean accuracy; runs that diverged count with what guessing gives, and are named."""
    diverged = sum(run.diverged for run in runs)
    note = f" ({diverged} of {len(runs)} diverged)" if diverged else ""
    return f"{mean(run.accuracy for run in runs):.2f}{note}"


def _on_par(power: str, peer: str, study: Study) -> Claim:
    ahead = study.ahead(power, peer)
    return Claim(
        claim=f"{power}, untuned, is on par with {peer}, {study.training.title}, {study.shards}",
        measured=f"{ahead.text('+.2f')} points, 95% interval",
        expected=f"not behind, or by less than {KEPT_POINTS:g} points",
        verdict=intervals.on_par(ahead, KEPT_POINTS),
        source=PAPER,
        reason=_for_less(power, peer, study),
    )


def _beats(power: str, peer: str, study: Study) -> Claim:
    ahead = study.ahead(power, peer)
    return Claim(
        claim=f"{power}, untuned, beats {peer}, {study.training.title}, {study.shards}",
        measured=f"{ahead.text('+.2f')} points, 95% interval",
        expected="above 0",
        verdict=intervals.verdict(ahead),
        source=PAPER,
        reason=_for_less(power, peer, study),
    )


def _for_less(power: str, peer: str, study: Study) -> str:
    ours, theirs = (mean(run.bytes_per_step for run in study.found[name]) for name in (power, peer))
    return f"it sends {ours / theirs:.2g} of the other's bytes"
