"""make chaos: kill -9 and SIGSTOP of a random rank at a random moment, over every exchange.

    python -m proof.chaos --kills 500                # the full run
    python -m proof.chaos --seed 3 --only 17         # one case again

A case follows from the seed and its number; the machine's own timing does not. What is promised: whoever survives goes
on to the end where the documentation says so, and else ends by an exception that says what happened; within the
time-out and MARGIN_SECONDS; never by a signal. Those who went on have equal weights. While a job is being set up,
gloo itself may take CONNECTING time-outs. Nothing stays behind: no process, no thread, no file, no network namespace.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from proof import doors, victims
from proof.doors import Setting
from proof.leftovers import nothing_stays
from proof.table import table
from proof.victims import CLOSING, SETUP, STEPS
from thinwire.lab.network import shaped
from thinwire.lab.network.network import parse_network
from thinwire.lab.runs import launch

TIMEOUT_SECONDS = 5.0
CONNECTING = 5  # time-outs that gloo takes to give up connecting
MARGIN_SECONDS = 20.0  # beyond the time-out, for whoever survives to end: other programs may be using the machine
PAUSE_SECONDS = 1.0  # of a rank that is stopped for less than the time-out
LINKS = "shaped:1gbit"
_SHAPING = threading.Lock()  # a process has one set of namespaces at a time

# What thinwire says. While a job is being set up, and in DDP's own broadcast after the first step, PyTorch speaks.
OURS = re.compile(
    r"could not be exchanged|the servers did not answer|is gone|is lost, and the job stops|workers were lost before|"
    r"refused this worker's push|lost in step|said nothing for|falls apart|no connection leads to them"
)
PYTORCH = re.compile(r"[Cc]onnection (was likely )?(closed|reset|refused)|[Tt]imed? ?out|Broken pipe|failed to connect")


@dataclass(frozen=True)
class Case:
    """Who is hit, when, and how."""

    number: int
    setting: Setting
    ranks: int
    victim: int
    teller: int  # the rank whose progress says when: the victim, if it trains
    moment: int  # a step, or SETUP, or CLOSING
    delay: float  # seconds after the moment has begun
    how: str  # kill; pause (stopped, shortly); wake (stopped beyond the time-out); stop (the same, and killed then)
    shaped: bool  # over links of their own

    @property
    def serves(self) -> bool:
        """Whether the victim does."""
        return "server" in self.setting.door and self.victim < self.setting.servers

    @property
    def early(self) -> bool:
        """While there are collectives of PyTorch's own: a lost rank ends the job."""
        return self.moment < (2 if self.setting.door in ("all-reduce", "server") else 0)

    def allowed(self, rank: int) -> set[str]:
        """How the documentation lets a rank end: "goes on" to the end, or "error"."""
        either = {"goes on", "error"}
        if self.how == "pause":
            return {"goes on"}
        if self.early or self.moment == CLOSING or (self.serves and self.how == "wake"):
            return either
        if rank == self.victim:  # woken: all others may have gone, and one that is alone may go on
            return either if self.setting.door == "gossip" else {"error"}
        if self.serves or self.setting.on_failure == "stop" or (self.setting.door == "gossip" and self.how != "kill"):
            return {"error"}
        return {"goes on"}


def case(seed: int, number: int) -> Case:
    """Doors and schemes take turns, in an order that the seed shuffles; all else is drawn."""
    combinations = [
        (door, scheme, on_failure)
        for door, specs in doors.DOORS.items()
        for scheme in specs
        for on_failure in (("stop",) if door == "all-reduce" else ("stop", "continue"))
    ]
    random.Random(seed).shuffle(combinations)
    door, scheme, on_failure = combinations[number % len(combinations)]
    chance = random.Random(f"{seed} {number}")
    servers = chance.choice([1, 1, 2]) if "server" in door else 0
    ranks = 3 if door == "all-reduce" else 4
    victim = chance.randrange(ranks)
    return Case(
        number,
        Setting(door, scheme, on_failure, servers, TIMEOUT_SECONDS),
        ranks,
        victim,
        teller=max(victim, servers),
        moment=chance.choice([SETUP, CLOSING, *[chance.randrange(STEPS // 2)] * 8]),
        delay=chance.uniform(0, 0.02) if chance.random() < 0.8 else chance.uniform(0, 0.3),
        how=chance.choice(["kill"] * 6 + ["pause", "wake", "stop"]),
        shaped=chance.random() < 0.1 and shaped.why_not() is None,
    )


@dataclass
class End:
    """How a rank ended."""

    how: str  # "goes on", "error", or what is no end at all
    seconds: float  # since the victim was hit; its own, since it was woken
    text: str = ""  # of the error
    weights: bytes = b""
    threads: Sequence[str] = ()  # that were left


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    ends: dict[int, End]
    failures: list[str] = field(default_factory=list)

    @property
    def others(self) -> list[End]:
        return [end for rank, end in self.ends.items() if rank != self.case.victim]

    @property
    def seconds(self) -> float:
        return max(end.seconds for end in self.others)


def run(case: Case) -> Outcome:
    """Start the ranks, hit the victim, hear how everybody ends, and hold it against the promise."""
    limit = MARGIN_SECONDS + TIMEOUT_SECONDS * (CONNECTING if case.moment == SETUP else 1)
    with _links(case) as namespaces, launch.started(victims.rank, case.ranks, case, namespaces=namespaces) as members:
        blow = Blow(case, [member.process.pid or 0 for member in members])
        left: dict[int, list[str]] = {}
        with suppress(TimeoutError):
            # A job has as long again to get to the moment.
            launch.listen(members, on_message=blow.heard(left), seconds=3 * limit, grace_seconds=None)
        blow.ended()
        ends = {member.rank: _end(member, blow, left) for member in members}
    outcome = Outcome(case, ends)
    if blow.moment is None:
        outcome.failures.append(f"the job did not get to {_moment(case)}")
    outcome.failures += judge(case, ends, limit)
    outcome.failures += [f"process {pid} is still there" for pid in blow.pids if Path(f"/proc/{pid}").exists()]
    return outcome


class Blow:
    """The hit. It comes from a thread, a little after the teller says that the moment has begun."""

    def __init__(self, case: Case, pids: list[int]) -> None:
        self.case, self.pids = case, pids
        self.moment: float | None = None  # when it was dealt
        self.woken: float | None = None  # when one was that had been stopped
        self._thread = threading.Thread(target=self._deal)

    def heard(self, left: dict[int, list[str]]):
        def on_message(message: tuple[str, int, list[str]]) -> None:
            kind, rank, threads = message
            if kind == "moment":
                self._thread.start()
            else:
                left[rank] = threads

        return on_message

    def ended(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _deal(self) -> None:
        case, now = self.case, time.monotonic
        time.sleep(case.delay)
        self._signal(case.victim, signal.SIGKILL if case.how == "kill" else signal.SIGSTOP)
        self.moment = now()
        if case.teller != case.victim:
            self._signal(case.teller, signal.SIGCONT)  # it need not wait for the blow any more
        if case.how == "pause":
            time.sleep(PAUSE_SECONDS)
            self._signal(case.victim, signal.SIGCONT)
        elif case.how != "kill":
            time.sleep(TIMEOUT_SECONDS + 1)
            self._signal(case.victim, signal.SIGKILL if case.how == "stop" else signal.SIGCONT)
            self.woken = now()

    def _signal(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):  # it was quicker
            os.kill(self.pids[rank], number)


def _end(member: launch.Member, blow: Blow, left: dict[int, list[str]]) -> End:
    rank, failure = member.rank, member.failure
    code = member.exit_code(MARGIN_SECONDS if member.ended else 0)  # what it does at exit is part of it
    now = time.monotonic()
    since = (blow.woken if rank == blow.case.victim else None) or blow.moment or now
    ended = member.result[0] if member.result else failure.at if failure and failure.at else now
    seconds = max(0.0, ended - since)
    if code is None:
        return End("hangs" if not member.ended else "hangs at exit", seconds)
    if code < 0:
        return End(f"killed by {signal.Signals(-code).name}", seconds)
    threads = left.get(rank, ())
    if failure is not None:
        text = failure.details or failure.reason
        return End("error" if code == 1 else f"exit code {code}", seconds, text, b"", threads)
    return End("goes on", seconds, "", member.result[1], threads)


def judge(case: Case, ends: dict[int, End], limit: float) -> list[str]:
    """What was promised and did not hold."""
    failures = []
    killed = case.how in ("kill", "stop")
    for rank, end in ends.items():
        who = f"{'the victim' if rank == case.victim else 'rank'} {rank}"
        if rank == case.victim and killed:
            if end.how != "killed by SIGKILL":
                failures.append(f"{who} {end.how}: {end.text}")
            continue
        if end.how not in case.allowed(rank):
            failures.append(f"{who} {end.how}, allowed: {' or '.join(sorted(case.allowed(rank)))}\n{end.text}")
        elif end.how == "error" and not _clear(case, end.text):
            failures.append(f"{who} does not say what happened:\n{end.text}")
        if end.seconds > limit:
            failures.append(f"{who} took {end.seconds:.1f} s to end, and has {limit:g}")
        if end.threads:
            failures.append(f"{who} has threads left: {', '.join(end.threads)}")
    equal = {end.weights for rank, end in ends.items() if end.how == "goes on" and rank != case.victim and end.weights}
    if len(equal) > 1 and case.setting.door != "asynchronous server":
        failures.append("those who went on have different weights")
    return failures


def _clear(case: Case, text: str) -> bool:
    pytorch_may_speak = case.early or case.moment == CLOSING
    last = text.rstrip().rsplit("\n\n", 1)[-1]  # the exception itself, not what it came from
    return bool(OURS.search(last) or (pytorch_may_speak and PYTORCH.search(last)))


@contextmanager
def _links(case: Case) -> Iterator[list[str] | None]:
    if not case.shaped:
        yield None
        return
    with _SHAPING, shaped.Shaped(parse_network(LINKS), case.ranks) as links:
        yield links.namespaces


def run_all(seed: int, numbers: Sequence[int], at_once: int = 2) -> tuple[list[Outcome], list[str]]:
    """Every case's outcome, and what was left at the end."""
    outcomes: list[Outcome] = []
    left: list[str] = []
    began = time.monotonic()

    def one(number: int) -> None:
        outcomes.append(run(case(seed, number)))
        failed = sum(bool(outcome.failures) for outcome in outcomes)
        done, seconds = len(outcomes), time.monotonic() - began
        words = f"chaos: {done} of {len(numbers)} cases, {failed} failed, {seconds / done:.1f} s each"
        print(f"\r{words}", end="", file=sys.stderr, flush=True)

    with nothing_stays(left), ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, numbers))
    print(file=sys.stderr)
    return sorted(outcomes, key=lambda outcome: outcome.case.number), left


def report(outcomes: Sequence[Outcome], *, by_scheme: bool = True) -> str:
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        setting = outcome.case.setting
        door = setting.door if setting.door == "all-reduce" else f"{setting.door}, {setting.on_failure}"
        scheme = (setting.scheme,) if by_scheme else ()
        groups.setdefault((door, *scheme, WORDS[outcome.case.how]), []).append(outcome)
    rows = [(*key, *_counted(groups[key])) for key in sorted(groups)]
    if not by_scheme:
        rows.append(("all", "", *_counted(outcomes)))
    head = ("door", *(("scheme",) if by_scheme else ()), "done to one rank")
    return table((*head, "cases", "all went on", "ended by error", "failures", "slowest seconds"), rows)


WORDS = {
    "kill": "kill -9", "pause": f"SIGSTOP for {PAUSE_SECONDS:g} s", "wake": "SIGSTOP beyond the time-out",
    "stop": "SIGSTOP, then kill -9",
}  # fmt: skip


def _counted(outcomes: Sequence[Outcome]) -> tuple[object, ...]:
    """Of the others, the victim aside."""
    went_on = sum(all(end.how == "goes on" for end in outcome.others) for outcome in outcomes)
    failures = sum(bool(outcome.failures) for outcome in outcomes)
    slowest = max(outcome.seconds for outcome in outcomes)
    return len(outcomes), went_on, len(outcomes) - went_on, failures, f"{slowest:.1f}"


def _moment(case: Case) -> str:
    return {SETUP: "its set-up", CLOSING: "its end"}.get(case.moment, f"step {case.moment}")


def describe(case: Case) -> str:
    setting, victim = case.setting, f"{'server' if case.serves else 'rank'} {case.victim} of {case.ranks}"
    where = f"{setting.door} (on_failure={setting.on_failure!r}), {setting.scheme}{', shaped links' * case.shaped}"
    return f"{where}: {WORDS[case.how]}, {victim}, {1e3 * case.delay:.0f} ms into {_moment(case)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="cases")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--at-once", type=int, default=2, help="cases at a time")
    options = parser.parse_args()
    print(f"chaos: seed {options.seed}")
    numbers = range(options.kills) if options.only is None else [options.only]
    outcomes, left = run_all(options.seed, numbers, options.at_once)
    if options.only is not None:
        print(describe(outcomes[0].case))
        for rank, end in outcomes[0].ends.items():
            print(f"\nrank {rank} {end.how} after {end.seconds:.1f} s\n{end.text}".rstrip())
    print(f"\n{report(outcomes)}\n\n{report(outcomes, by_scheme=False)}")
    failed = [outcome for outcome in outcomes if outcome.failures]
    for outcome in failed:
        told = "\n".join(outcome.failures)
        again = f"python -m proof.chaos --seed {options.seed} --only {outcome.case.number}"
        print(f"\nFAILED: {describe(outcome.case)}\n{told}\n  again: {again}")
    for what in left:
        print(f"\nFAILED: left behind: {what}")
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main())
