"""What the lab writes down, as JSON: a plan before a run, a run after it, the record of a comparison."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.lab.runs import curves

if TYPE_CHECKING:
    from thinwire.lab.tasks.tasks import Task

FORMAT = 3


@dataclass(frozen=True)
class RunPlan:
    """One run to be made: task x scheme x exchange x network x seed. Over gossip, `scheme` is a mixer."""

    task: str
    scheme: str
    seed: int
    exchange: str = "allreduce"
    network: str = "none"
    workers: int = 4
    steps: int | None = None  # None: as many as the task says
    data: str | None = None
    controller: str | None = None  # who turns the scheme's knob
    every: int = 1  # steps between two exchanges; above 1, weight changes travel instead of gradients
    outer: str = "average"  # what then moves the common weights
    local: int = 1  # workers of one machine, which share its link
    parallel: str = "ddp"  # "fsdp": sharded over a machine's workers, or over all where each has a machine of its own
    options: Mapping[str, Any] = field(default_factory=dict)  # of `LocalSteps`, beside those above
    rate: float = 1.0  # times the task's own learning rate
    longer: float = 1.0  # so many times `steps`
    tested: bool = True  # on the test examples, once, at the end; False: a trial, of whose curve only the end counts
    compute: str = "fp32"  # "bf16": forward and backward under autocast
    timed: int | None = None  # only so many steps, after a few off the clock: how long a step takes

    def steps_of(self, task: Task) -> int:
        """How many there are."""
        return round((self.steps or task.steps) * self.longer)

    @property
    def name(self) -> str:
        """What is run, in one word; the exchange is named beside it."""
        by = "" if self.controller is None else f" by {self.controller}"
        every = f" every {self.every}" if self.every > 1 else ""
        return f"{self.scheme}{by}{every}" + (f", computed in {self.compute}" if self.compute != "fp32" else "")


@dataclass(frozen=True)
class CurvePoint:
    """How far a run has come. Seconds are those of training, evaluation not counted. The score is that on validation
    examples. Bytes are those on the wire per worker: what one worker sends, and what servers send to it.
    """

    step: int
    seconds: float
    bytes_sent: float
    loss: float
    score: float
    level: float = 0.0  # of the scheme's knob


@dataclass
class Run:
    """What became of a plan. `reason` says why it failed, and is None for a run that came to its end.

    `totals`, per worker, over the whole run: steps, rounds (of exchanges), seconds; bytes_sent, what servers sent to it
    included; compute_seconds, encode_seconds and wire_seconds, which add up to seconds (encode and wire count only
    where training waited for them); vnmse, the mean of |X - Xhat|^2 / |X|^2 at the evaluated steps, X the exact mean
    gradient of the step, Xhat what was applied (NaN where no common mean is applied). In shaped networks also,
    everything that workers and servers sent, divided by the workers: interface_bytes, as the kernel counts;
    interface_payload_bytes, without the headers of Ethernet, IP and TCP and what TCP sent again; what they should come
    to, ledger_bytes and ledger_overhead_bytes (gloo's own headers, by the number of messages). Where workers share a
    machine's link, or shards gather weights, the ledger cannot say what the link carries: bytes_sent is
    interface_payload_bytes then.
    """

    plan: RunPlan
    metric: str
    rising: bool  # more of the metric is better
    target: float | None  # None: what the baseline holds, see `curves.set_targets`
    steps: int
    curve: list[CurvePoint] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    final: float | None = None  # the score on the test examples after the last step; None: not looked at

    @property
    def score(self) -> float:
        """What the run ends with: on the test examples, or as far as it was watched."""
        return self.curve[-1].score if self.final is None else self.final

    @property
    def seconds_to_target(self) -> float | None:
        """Training seconds until the rolling mean of the scores meets the target; None: never, or no target."""
        return None if self.target is None else curves.crossing(self.curve, self.target, rising=self.rising)


@dataclass
class Record:
    """A comparison: its configuration, where and with what it was made, every run, and every trial of `--tune`."""

    config: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    trials: list[Run] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: _machine())
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    interrupted: bool = False
    format: int = FORMAT

    def by_network(self) -> list[Record]:
        """A record per network, in the order of the comparison; this one where there is but one."""
        networks = list(dict.fromkeys(run.plan.network for run in self.runs))
        if len(networks) < 2:
            return [self]
        return [
            replace(self, config=self.config | {"network": name}, runs=[r for r in self.runs if r.plan.network == name])
            for name in networks
        ]

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")

    def as_json(self) -> dict[str, Any]:
        return _without_nan(asdict(self))

    @classmethod
    def load(cls, file: Path) -> Record:
        try:
            read = json.loads(file.read_text())
        except FileNotFoundError:
            raise ValueError(f"missing file: {file}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not JSON: {error}") from None
        if isinstance(read, dict):
            read.setdefault("trials", [])  # older ones have none
        if not isinstance(read, dict) or read.get("format") != FORMAT or set(read) != {f.name for f in fields(cls)}:
            raise ValueError(f"{file} is not a record of `thinwire compare` (format {FORMAT})")
        try:
            read |= {name: [_run(run) for run in read[name]] for name in ("runs", "trials")}
        except (TypeError, KeyError, AttributeError):
            raise ValueError(f"{file} holds a run that cannot be read") from None
        return cls(**read)


def _run(read: dict[str, Any]) -> Run:
    points = [CurvePoint(**{name: _number(value) for name, value in point.items()}) for point in read["curve"]]
    totals = {name: _number(value) for name, value in read["totals"].items()}
    return Run(**{**read, "plan": RunPlan(**read["plan"]), "curve": points, "totals": totals})


def _without_nan(tree: Any) -> Any:
    """JSON has no NaN and no infinity; what training brought to them is written as null."""
    if isinstance(tree, dict):
        return {name: _without_nan(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_without_nan(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _number(value: Any) -> Any:
    return math.nan if value is None else value


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("thinwire", "torch", "numpy")}
