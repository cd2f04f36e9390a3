"""make torch-tests: PyTorch's own DDP tests, on gloo and the CPU, with every DistributedDataParallel attached.

    python -m proof.torch_tests
    python -m proof.torch_tests --only test_ddp_join_model_equivalence --variant qsgd    # one, with its traceback

They come with PyTorch (torch.testing._internal.distributed); where one asks for a GPU, the CPU stands in. Every test
that passes plain is run again with each variant of VARIANTS. A test that compares numbers fails when they are rounded
to 8 bits, and should: so what fails under qsgd is run once more by the same way with every parameter exempt, which
sends exact sums through everything but the rounding. What fails there, too, is ours.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from proof import without_gpu
from proof.table import table
from thinwire.lab.runs import launch

WORKERS = 2
SECONDS = 150.0  # of one test; nearly all take 2
ENVIRONMENT = {"BACKEND": "gloo", "WORLD_SIZE": str(WORKERS), "GLOO_SOCKET_IFNAME": "lo"}  # read when it is imported
MODULE = "torch.testing._internal.distributed.distributed_test"
EXACT = "qsgd, all exempt"
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "fp32": {"scheme": "fp32"},
    "qsgd": {"scheme": "qsgd(bits=8)", "exempt": ()},
    EXACT: {"scheme": "qsgd(bits=8)", "exempt": ("*",)},
}


# What an attached model is not, by design.
BY_NATURE = {
    "test_ddp_comm_hook_logging": "asserts that DDP logs no communication hook; the wire is one",
    "test_ddp_grad_div_uneven_inputs": "join(divide_by_initial_world_size=False), which attach refuses and says why",
    "test_ddp_profiling_torch_profiler": "counts DDP's all-reduces in the profile; the lane sends other collectives",
}


@dataclass(frozen=True)
class Result:
    """How a test ended: "passed", "skipped" or "failed"."""

    how: str
    reason: str = ""  # the first line of what it says
    details: str = ""  # the traceback


@cache
def _tests() -> type:
    """PyTorch's tests, as a class. Imported late: the module reads its environment."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")
    without_gpu.lift_skips()
    module = importlib.import_module(MODULE)
    return type("Tests", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def names() -> list[str]:
    """The tests that make a DistributedDataParallel, by themselves or by what they call."""
    tests = _tests()
    return [name for name in dir(tests) if name.startswith("test_") and _makes_ddp(tests, name, frozenset())]


def _makes_ddp(tests: type, name: str, seen: frozenset[str]) -> bool:
    text = inspect.getsource(inspect.unwrap(getattr(tests, name)))
    called = {other for other in re.findall(r"self\.(_\w+)", text) if callable(getattr(tests, other, None))} - seen
    seen |= {name} | called
    return "DistributedDataParallel(" in text or any(_makes_ddp(tests, other, seen) for other in called)


def _rank(place: launch.Place, name: str, variant: str) -> Result:
    """One rank of a test, as PyTorch's own runner would start it."""
    os.environ.update(ENVIRONMENT, TEMP_DIR=str(place.folder))
    for folder in ("barrier", "test_dir"):
        (place.folder / folder).mkdir(exist_ok=True)
    test = _tests()(name)
    test.rank, test.file_name = place.rank, str(place.folder / "rendezvous")
    without_gpu.stand_in()
    options = VARIANTS[variant]
    if options is not None:
        _attach_all(options)
    dist.init_process_group(
        "gloo", init_method=f"file://{test.file_name}", rank=place.rank, world_size=place.ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    dist.barrier()  # nobody leaves, skipped, while another is still joining
    try:
        with without_gpu.OnTheCPU():
            getattr(test, name)()
    except unittest.SkipTest as skip:
        return Result("skipped", str(skip))
    except SystemExit as leaving:  # how a test in a process of its own says that it was skipped
        return Result("skipped", f"exit code {leaving.code}")
    return Result("passed")


def _attach_all(options: dict[str, Any]) -> None:
    """From now on every model that is made is attached."""
    plain = DistributedDataParallel.__init__

    def attached(self: DistributedDataParallel, *arguments: Any, **keywords: Any) -> None:
        plain(self, *arguments, **keywords)
        tw.attach(self, **options)

    DistributedDataParallel.__init__ = attached


def run(name: str, variant: str) -> Result:
    with launch.started(_rank, WORKERS, name, variant) as members:
        try:
            failure = launch.listen(members, seconds=SECONDS)
        except TimeoutError:
            return Result("failed", f"no end within {SECONDS:g} seconds")
        if failure is None:
            return next((member.result for member in members if member.result.how == "skipped"), Result("passed"))
        reason = failure.reason.removeprefix("failed: ").partition(" To execute this test")[0]
        return Result("failed", reason[:160], failure.details)


def run_all(tests: Sequence[str], variant: str, at_once: int = 2) -> dict[str, Result]:
    done, began = 0, time.monotonic()

    def one(name: str) -> Result:
        nonlocal done
        result = run(name, variant)
        done += 1
        words = f"torch-tests: {variant}: {done} of {len(tests)}, {time.monotonic() - began:.0f} s"
        print(f"\r{words}", end="", file=sys.stderr, flush=True)
        return result

    with ThreadPoolExecutor(at_once) as pool:
        results = dict(zip(tests, pool.map(one, tests), strict=True))
    print(file=sys.stderr)
    return results


@dataclass(frozen=True)
class Finding:
    """A test that passes plain and fails attached."""

    name: str
    variant: str
    why: str
    ours: bool  # a defect


def why(name: str, result: Result, exact: Result | None) -> tuple[str, bool]:
    """In a few words, and whether it is a defect. exact: how the test ended with exact sums through the same way."""
    if re.search(r"hook can only be called once|has a communication hook already", result.reason):
        return "has a communication hook of its own, and DDP takes one", False
    if name in BY_NATURE:
        return BY_NATURE[name], False
    if exact is not None and exact.how == "passed":
        return "compares numbers, which 8 bits round; passes with every parameter exempt", False
    return result.reason, True


def findings(results: dict[str, dict[str, Result]]) -> list[Finding]:
    """What newly fails. results: by variant and name."""
    passed = [name for name, result in results["plain"].items() if result.how == "passed"]
    exact = results.get(EXACT, {})
    found = []
    for variant in ("fp32", "qsgd"):
        for name in passed:
            result = results.get(variant, {}).get(name, Result("passed"))
            if result.how != "passed":
                reason, ours = why(name, result, exact.get(name) if variant == "qsgd" else None)
                found.append(Finding(name, variant, reason, ours))
    return found


def report(results: dict[str, dict[str, Result]], found: Sequence[Finding]) -> str:
    rows = []
    for variant, each in results.items():
        count = Counter(result.how for result in each.values())
        new = [finding for finding in found if finding.variant == variant]
        defects = sum(finding.ours for finding in new)
        rows.append((variant, len(each), count["passed"], count["skipped"], count["failed"], len(new), defects))
    tests = table(("models attached", "tests", "pass", "skipped", "fail", "newly", "of them defects"), rows)
    news = table(("test", "variant", "why it newly fails"), [(f.name, f.variant, f.why) for f in found])
    return f"{tests}\n\n{news}" if found else tests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="this test alone; may be given again")
    parser.add_argument("--variant", choices=VARIANTS, help="this variant alone, with tracebacks")
    parser.add_argument("--at-once", type=int, default=2, help="tests at a time")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    launch.CONTEXT.set_forkserver_preload([*launch.PRELOAD, "torch.testing._internal.common_distributed"])
    forkserver.ensure_running()
    tests = options.only or names()
    if options.variant:
        for name, result in run_all(tests, options.variant, options.at_once).items():
            print(f"{name}: {result.how} {result.reason}\n{result.details}".rstrip())
        return 0
    results = {"plain": run_all(tests, "plain", options.at_once)}
    passed = [name for name, result in results["plain"].items() if result.how == "passed"]
    for variant in ("fp32", "qsgd"):
        results[variant] = run_all(passed, variant, options.at_once)
    results[EXACT] = run_all(
        [name for name, result in results["qsgd"].items() if result.how != "passed"], EXACT, options.at_once
    )
    found = findings(results)
    print(report(results, found))
    for finding in found:
        if finding.ours:
            again = f"python -m proof.torch_tests --only {finding.name} --variant {finding.variant}"
            print(f"\nFAILED: {finding.name} under {finding.variant}: {finding.why}\n  again: {again}")
    return int(any(finding.ours for finding in found))


if __name__ == "__main__":
    sys.exit(main())
