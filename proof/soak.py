"""make soak: train for long, over every exchange; memory, threads, descriptors and step time stay flat.

    python -m proof.soak --minutes 30

Two processes each. Over all-reduce and gossip a cycle goes through all schemes or mixers, each attached, trained,
saved, loaded, trained and closed; with servers there is one session, saved and loaded in every cycle. Every rank is
measured after every cycle. The first quarter is warm-up; after it

- memory: the line fitted to resident memory rises by MEMORY_SHARE of it at most, over the whole time;
- threads and file descriptors: constant;
- step time: the last quarter's median is at most STEP_FACTOR times the second quarter's.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from proof import doors
from proof.doors import Setting, Trainer
from proof.table import table
from thinwire.exchange import left
from thinwire.lab.runs import launch

RANKS = 2
STEPS = 20  # of a scheme in a cycle, before it is saved and loaded, and after
MEMORY_SHARE = 0.01
STEP_FACTOR = 2.0  # other programs may be using the machine
SESSIONS = {"server": "topk(density=0.01)", "asynchronous server": "qsgd(bits=4)"}  # one scheme to the end
FEWEST = 8  # cycles: a verdict needs so many


@dataclass(frozen=True)
class Sample:
    """A rank after a cycle."""

    rank: int
    seconds: float  # since the start
    steps: int  # since the start
    resident_bytes: int
    threads: int
    descriptors: int
    step_seconds: float  # the median of the cycle's; 0 on a rank that serves


@dataclass(frozen=True)
class Verdict:
    """What the samples of one rank say; `failures` is empty where all is flat."""

    before: Sample
    after: Sample
    growth_bytes: float  # by the fitted line, after warm-up
    bytes_per_step: float
    step_ratio: float
    failures: list[str]


def verdict(samples: Sequence[Sample]) -> Verdict:
    if len(samples) < FEWEST:
        raise ValueError(f"a verdict needs {FEWEST} samples, got {len(samples)}")
    quarter = len(samples) // 4
    kept = samples[quarter:]
    steps = [sample.steps for sample in kept]
    slope, _ = statistics.linear_regression(steps, [sample.resident_bytes for sample in kept])
    growth = slope * (steps[-1] - steps[0])
    second, last = (statistics.median(s.step_seconds for s in part) for part in (kept[:quarter], kept[-quarter:]))
    ratio = last / second if second else 1.0
    failures = []
    allowed = MEMORY_SHARE * statistics.median(sample.resident_bytes for sample in kept)
    if growth > allowed:
        failures.append(f"memory grew by {_mib(growth)} MiB, {slope:,.0f} bytes per step; allowed: {_mib(allowed)} MiB")
    for what in ("threads", "descriptors"):
        values = sorted({getattr(sample, what) for sample in kept})
        if len(values) > 1:
            failures.append(f"{what}: between {values[0]} and {values[-1]}")
    if ratio > STEP_FACTOR:
        failures.append(f"steps take {ratio:.2f} times as long as at first; allowed: {STEP_FACTOR:g}")
    return Verdict(kept[0], samples[-1], growth, slope, ratio, failures)


def _rank(place: launch.Place, door: str, seconds: float) -> None:
    with place.joined():
        if door not in SESSIONS:
            settings = [Setting(door, spec) for spec in doors.DOORS[door]]
            _cycles(place, lambda: [t for each in settings for t in _attached(place, each)], seconds, _first_says)
            return
        if place.rank == 0:
            (place.folder / "server").write_text(str(os.getpid()))
        with doors.opened(place, Setting(door, SESSIONS[door])) as trainer:
            if trainer is not None:  # the server cannot measure itself while it serves
                server = int((place.folder / "server").read_text())
                _cycles(place, lambda: _train(trainer), seconds, lambda going: going, server)


def _cycles(
    place: launch.Place, cycle: Callable[[], list[float]], seconds: float, agreed: Callable[[bool], bool],
    server: int | None = None,
) -> None:  # fmt: skip
    """Cycles, which say how long their steps took; after each a sample of this process, and of the server if any."""
    steps, began, now, count = 0, time.monotonic(), 0.0, 0
    while agreed(now < seconds or count < FEWEST):
        times = cycle()
        steps, count, now = steps + len(times), count + 1, time.monotonic() - began
        left.let_go()  # what was closed a moment ago is no leak
        place.send(measured(os.getpid(), place.rank, now, steps, statistics.median(times)))
        if server is not None:
            place.send(measured(server, 0, now, steps, 0.0))


def _first_says(going: bool) -> bool:
    """The first rank's clock counts, so that all end with the same cycle."""
    word = torch.tensor([going], dtype=torch.uint8)
    dist.broadcast(word, 0)
    return bool(word)


def _attached(place: launch.Place, setting: Setting) -> list[float]:
    with doors.opened(place, setting) as trainer:
        assert trainer is not None
        return _train(trainer)


def _train(trainer: Trainer) -> list[float]:
    """The seconds of every step."""
    times = []
    for step in range(2 * STEPS):
        if step == STEPS:
            _save_and_load(trainer)
        began = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - began)
    return times


def _save_and_load(trainer: Trainer) -> None:
    """Through bytes, as a file would be."""
    file = io.BytesIO()
    torch.save(trainer.handle.state_dict(), file)
    file.seek(0)
    trainer.handle.load_state_dict(torch.load(file, weights_only=True))


def measured(pid: int, rank: int, seconds: float, steps: int, step_seconds: float) -> Sample:
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    threads, descriptors = (len(os.listdir(process / what)) for what in ("task", "fd"))
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return Sample(rank, seconds, steps, resident, threads, descriptors, step_seconds)


def run(door: str, seconds: float, on_sample: Callable[[Sample], object] = lambda sample: None) -> list[list[Sample]]:
    """The samples of every rank."""
    samples: list[list[Sample]] = [[] for _ in range(RANKS)]
    with launch.started(_rank, RANKS, door, seconds) as members:

        def take(sample: Sample) -> None:
            samples[sample.rank].append(sample)
            on_sample(sample)

        failure = launch.listen(members, on_message=take, seconds=2 * seconds + 240)
        if failure is not None:
            raise RuntimeError(f"{door}: rank {failure.rank} {failure.reason}\n{failure.details}")
    return samples


def report(verdicts: dict[tuple[str, str], Verdict]) -> str:
    rows = []
    for (door, role), each in verdicts.items():
        before, after = each.before, each.after
        rows.append(
            (
                door,
                role,
                f"{after.steps:,}",
                f"{_mib(before.resident_bytes)} -> {_mib(after.resident_bytes)}",
                f"{_mib(each.growth_bytes)}",
                f"{each.bytes_per_step:,.1f}",
                f"{before.threads} -> {after.threads}",
                f"{before.descriptors} -> {after.descriptors}",
                f"{each.step_ratio:.2f}" if after.step_seconds else "",
                "; ".join(each.failures) or "flat",
            )
        )
    head = (
        "door", "rank", "steps", "resident MiB", "fitted growth, MiB", "bytes a step", "threads", "descriptors",
        "step time, last / second quarter", "verdict",
    )  # fmt: skip
    return table(head, rows)


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="in all")
    parser.add_argument("--door", action="append", choices=doors.DOORS, help="only this one; may be given again")
    options = parser.parse_args()
    chosen = options.door or list(doors.DOORS)
    verdicts = {}
    for door in chosen:

        def show(sample: Sample, door: str = door) -> None:
            words = f"soak: {door}: {sample.seconds:.0f} s, {sample.steps:,} steps, {_mib(sample.resident_bytes)} MiB"
            print(f"\r{words}  ", end="", file=sys.stderr, flush=True)

        for rank, samples in enumerate(run(door, 60 * options.minutes / len(chosen), show)):
            role = "server" if rank == 0 and door in SESSIONS else "worker"
            verdicts[door, f"{rank}, {role}"] = verdict(samples)
        print(file=sys.stderr)
    print(report(verdicts))
    failed = {key: each for key, each in verdicts.items() if each.failures}
    for (door, role), each in failed.items():
        print(f"\nFAILED: {door}, rank {role}: {'; '.join(each.failures)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
