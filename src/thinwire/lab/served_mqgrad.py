"""The best fixed width and MQGrad on a real parameter server: five processes, paced links, the clock on the wall."""

from __future__ import annotations

import datetime
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from statistics import fmean, pstdev
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire.ddp import attach
from thinwire.lab.paced import Pace, PacedLedger
from thinwire.server import join

LIMIT_STEPS = 800


def compare(
    specs: dict[str, str], seeds: int, progress: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A table of wall seconds to the target, and the claim that the last of `specs` is no later than the first."""
    seconds: dict[str, list[float]] = {name: [] for name in specs}
    for seed in range(seeds):  # interleaved, so that a busy machine is busy for all
        for name, spec in specs.items():
            progress(f"mqgrad: {name} on a parameter server, seed {seed}")
            seconds[name].append(run(spec.format(seed=seed), seed))
    rows = [
        (name, f"{fmean(each):.1f} ± {pstdev(each):.1f}" if all(map(math.isfinite, each)) else "not always reached")
        for name, each in seconds.items()
    ]
    (fixed, theirs), (_, ours) = ((name, fmean(each)) for name, each in seconds.items())
    table = {
        "title": f"a real server, paced links, {seeds} seeds",
        "columns": ("controller", "wall seconds"),
        "rows": rows,
    }
    claim = {
        "claim": "so it does on a real server over paced links",
        "measured": f"{ours:.1f} s",
        "expected": f"at most {theirs:.1f} s ({fixed})",
        "holds": ours <= theirs,
    }
    return table, claim


def run(spec: str, seed: int) -> float:
    """Wall seconds to the target loss under one controller; infinite where it was not reached."""
    from thinwire.lab.repro_mqgrad import WORKERS

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=_rank, args=(rank, WORKERS + 1, f"{folder}/store", spec, seed, theirs))
            for rank in range(WORKERS + 1)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        try:
            return ours.recv()
        except EOFError:
            raise RuntimeError(f"a rank failed under {spec}; its traceback is above") from None
        finally:
            for process in ranks:
                process.join(30)
                if process.is_alive():
                    process.kill()
                process.join()


def _rank(rank: int, ranks: int, store: str, spec: str, seed: int, connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=300)
    )
    role = join(servers=1, lost="stop")
    if role.serves:
        role.serve()
    else:
        reached = _train(role, spec, seed)
        if rank == 1:
            connection.send(reached)
    connection.close()
    dist.destroy_process_group()


def _train(role, spec: str, seed: int) -> float:
    from thinwire.lab import repro_mqgrad as setup

    worker, exchange = role.exchange.worker, role.exchange
    rate = setup.LINK_MBPS * 1e6
    exchange.ledger = PacedLedger(Pace(rate), down=Pace(rate))
    torch.manual_seed(seed)
    model = DistributedDataParallel(setup.network(), process_group=role.workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels, _, _ = setup.half_size_images()
    generator = torch.Generator().manual_seed(seed)
    group = setup.WORKERS * setup.BATCH
    order, at, smooth = torch.randperm(len(images), generator=generator), 0, math.nan
    with attach(model, setup.Ladder(), exchange=exchange, controller=spec, exempt=(), seed=seed) as wire:
        began = time.perf_counter()
        for _ in range(LIMIT_STEPS):
            if at + group > len(images):
                order, at = torch.randperm(len(images), generator=generator), 0
            rows = order[at + worker * setup.BATCH : at + (worker + 1) * setup.BATCH]
            at += group
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            wire.observe(loss)
            everybody = loss.detach().clone()
            dist.all_reduce(everybody, group=role.workers)
            mean = everybody.item() / setup.WORKERS
            smooth = mean if math.isnan(smooth) else 0.95 * smooth + 0.05 * mean
            if smooth <= setup.TARGET_LOSS:
                return time.perf_counter() - began
    return math.inf
