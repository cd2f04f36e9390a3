"""make fuzz: inputs that are nearly right, for everything that reads what others made.

    python -m proof.fuzz --inputs 1000000                     # the full run
    python -m proof.fuzz --seed 3 --target frames --only 17   # one input again, in this process

Every input follows from the seed, its target and its number. Decoders run in processes of their own, so that a crash is
reported and not suffered. What may happen: an input is taken, or refused by ValueError. All else is a failure: another
exception, a crash, two seconds without an answer, memory beyond the limit.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import random
import resource
import shlex
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proof.table import table
from proof.targets import Target, every_target
from thinwire.lab.runs import launch

CHUNK = 5_000  # inputs of one process
LONG_SECONDS = 2.0  # of one input
STUCK_SECONDS = 60.0  # of a process
MEMORY = 2 << 30  # bytes that a process may have beyond what it begins with


@dataclass
class Found:
    """What came of one target's inputs."""

    inputs: int = 0
    taken: int = 0
    refused: int = 0
    seconds: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)  # the first words of what was said
    failures: dict[int, str] = field(default_factory=dict)  # by number

    def add(self, other: Found) -> None:
        for name in ("inputs", "taken", "refused", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.refusals += other.refusals
        self.failures |= other.failures


def made(target: Target, seed: int, number: int) -> Any:
    return target.make(random.Random(f"{seed} {target.name} {number}"))


def feed(target: Target, seed: int, numbers: range, before: Any = lambda number: None) -> Found:
    """Every input of `numbers`, in this process; `before` hears each number first."""
    found, began = Found(), time.perf_counter()
    for number in numbers:
        before(number)
        given = made(target, seed, number)
        try:
            target.take(given)
            found.taken += 1
        except ValueError as error:
            found.refused += 1
            found.refusals[" ".join(str(error).split()[:3])] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            found.failures[number] = f"{type(error).__name__}: {error} ({place})"[:300]
        found.inputs += 1
    found.seconds = time.perf_counter() - began
    return found


def _process(place: launch.Place, name: str, seed: int, numbers: range, diary: str) -> Found:
    """`feed` with every number written down first, for the parent to read where this process crashes."""
    warnings.simplefilter("ignore")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    target = every_target()[name]()
    descriptor = os.open(diary, os.O_WRONLY)
    signal.signal(signal.SIGALRM, _too_long)

    def before(number: int) -> None:
        os.pwrite(descriptor, struct.pack("<q", number), 0)
        signal.setitimer(signal.ITIMER_REAL, LONG_SECONDS)

    try:
        return feed(target, seed, numbers, before)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.close(descriptor)


def _too_long(*_: object) -> None:
    raise RuntimeError(f"no answer within {LONG_SECONDS:g} seconds")


def in_processes(name: str, seed: int, numbers: range, folder: Path, on_inputs: Any) -> Found:
    """All inputs of a target; after a crash the next process goes on behind it."""
    found, at = Found(), numbers.start
    diary = folder / f"{abs(hash(name))}"
    while at < numbers.stop:
        part = range(at, min(at + CHUNK, numbers.stop))
        diary.write_bytes(struct.pack("<q", at))
        with launch.started(_process, 1, name, seed, part, str(diary)) as [member]:
            try:
                failure = launch.listen([member], seconds=STUCK_SECONDS)
                reason = failure and (failure.details or failure.reason)
            except TimeoutError:
                reason = f"no answer within {STUCK_SECONDS:g} seconds"
        if reason is None:
            found.add(member.result)
            at = part.stop
        else:
            (number,) = struct.unpack("<q", diary.read_bytes())
            found.add(Found(inputs=number + 1 - at, failures={number: reason}))
            at = number + 1
        on_inputs(at - part.start)
    return found


def run(names: list[str], seed: int, inputs: int, processes: int = 2) -> dict[str, Found]:
    """`inputs` in all, shared out evenly."""
    share, done, began = -(-inputs // len(names)), 0, time.monotonic()

    def on_inputs(count: int) -> None:
        nonlocal done
        done += count
        rate = done / (time.monotonic() - began)
        print(f"\rfuzz: {done:,} of {share * len(names):,} inputs, {rate:,.0f} a second", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="thinwire-fuzz-") as folder, ThreadPoolExecutor(processes) as pool:
        work = {name: pool.submit(in_processes, name, seed, range(share), Path(folder), on_inputs) for name in names}
        found = {name: future.result() for name, future in work.items()}
    print(file=sys.stderr)
    return found


def report(found: dict[str, Found], seconds: float) -> str:
    rows = [
        (
            name,
            f"{f.inputs:,}",
            f"{f.taken:,}",
            f"{f.refused:,}",
            len(f.failures),
            f"{f.inputs / max(f.seconds, 1e-9):,.0f}",
        )
        for name, f in found.items()
    ]
    total = Found()
    for each in found.values():
        total.add(each)
    rows.append(
        (
            "all",
            f"{total.inputs:,}",
            f"{total.taken:,}",
            f"{total.refused:,}",
            sum(len(f.failures) for f in found.values()),
            f"{total.inputs / seconds:,.0f}",
        )
    )
    return table(("target", "inputs", "taken", "refused (ValueError)", "failures", "a second"), rows)


def keep(folder: Path, target: Target, seed: int, number: int) -> None:
    """Write an input down."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{target.name} {number}.pickle".replace("/", "_")).write_bytes(pickle.dumps(made(target, seed, number)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=200_000, help="in all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--target", action="append", help="only this one; may be given again")
    parser.add_argument("--only", type=int, help="this input of --target alone, in this process")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a folder to write the inputs of failures to, pickled")
    options = parser.parse_args()
    names = options.target or list(every_target())
    if options.only is not None:
        target = every_target()[names[0]]()
        print(repr(given := made(target, options.seed, options.only)))
        target.take(given)
        return 0
    print(f"fuzz: seed {options.seed}")
    began = time.monotonic()
    found = run(names, options.seed, options.inputs, options.processes)
    print(report(found, time.monotonic() - began))
    for name, each in found.items():
        for number, reason in list(each.failures.items())[:5]:
            again = f"--seed {options.seed} --target {shlex.quote(name)} --only {number}"
            print(f"\nFAILED: {name}: {reason}\n  again: python -m proof.fuzz {again}")
            if options.keep:
                keep(options.keep, every_target()[name](), options.seed, number)
    return int(any(each.failures for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
