"""Do proxies predict training? Throughput and vNMSE beside seconds to accuracy, at matched bits per coordinate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from thinwire.exchange.simulation import Simulation
from thinwire.lab.network import links
from thinwire.lab.network.network import Network
from thinwire.lab.report import table
from thinwire.lab.report.table import number_text, score_text, times
from thinwire.lab.repro._utility_claims import (
    FP16,
    FP32,
    FULL,
    POWERSGD,
    SATURATING,
    THC,
    TNQ,
    TOPK,
    TOPKC,
    Candidate,
    CandidateResult,
    claims_of,
    compressed_of,
    seconds_text,
)
from thinwire.lab.repro.claims import Listing, Progress, Reproduction
from thinwire.lab.runs import curves
from thinwire.lab.runs.record import Record, RunPlan
from thinwire.lab.runs.run import execute
from thinwire.lab.tasks import estimates
from thinwire.lab.tasks.estimates import Named
from thinwire.lab.tasks.tasks import Task, load_task

WORKERS = 4
NETWORK = "auto:100mbit"
TASK = "mlp(width=512, steps=60, evaluate_every=2)"
WARM, ROUNDS = 5, 5  # steps that vNMSE is measured on, after those that schemes with a memory settle in
# The partial rotation has ten stages, as in the code of THC's authors; our own default has twelve.
CANDIDATES = (
    FP32,
    FP16,
    Candidate(TOPK, 0.5, "topk(density=0.0215)", quick=True),
    Candidate(TOPKC, 0.5, "topkc(density=0.0234, chunk=128)", quick=True),
    Candidate(POWERSGD, 0.5, "powersgd(factor_rank=4)", quick=True),
    Candidate(TOPK, 2, "topk(density=0.096)"),
    Candidate(TOPKC, 2, "topkc(density=0.1094)"),
    Candidate(POWERSGD, 2, "powersgd(factor_rank=15)"),
    Candidate(TNQ, 2, "tnq(bits=2)"),
    Candidate(SATURATING, 2, "thc(bits=2, rotate=10, saturate=True)"),
    Candidate(TNQ, 4, "tnq(bits=4)", quick=True),
    Candidate(THC, 4, "thc(bits=2, rotate=10)"),
    Candidate(SATURATING, 4, "thc(bits=4, rotate=10, saturate=True)", quick=True),
    Candidate(THC, 6, "thc(bits=4, rotate=10)", quick=True),
    Candidate(FULL, 6, "thc(bits=4, rotate=30)", quick=True),
    Candidate(TOPKC, 8, "topkc(density=0.4844)"),
    Candidate(TNQ, 8, "tnq(bits=8)"),
    Candidate(THC, 8, "thc(bits=6, rotate=10)"),
    Candidate(SATURATING, 8, "thc(bits=8, rotate=10, saturate=True)"),
)


def reproduce(quick: bool, data: Path | None, seeds: int, progress: Progress) -> Reproduction:
    """Real runs on the lab's network. `quick`: half of the schemes. `data` is not needed: the images are embedded."""
    candidates = [each for each in CANDIDATES if each.quick or not quick]
    net = links.resolved(NETWORK, WORKERS)
    progress("vNMSE on gradients of the task")
    gradients = task_gradients(load_task(TASK))
    errors = {each.spec: mean_vnmse(each.spec, gradients) for each in candidates}
    record = train_all(candidates, net, seeds, progress)
    results = results_of(candidates, record, errors)
    return Reproduction(claims_of(results), [_result_table(results, record), _order_table(results)])


def train_all(candidates: Sequence[Candidate], net: Network, seeds: int, progress: Progress) -> Record:
    """Every candidate once, then the next seed: what disturbs the machine for a while disturbs all alike."""
    record = Record(
        {
            "tasks": [TASK], "schemes": [each.spec for each in candidates], "exchanges": ["allreduce"],
            "network": str(net), "why_paced": net.why_paced, "seeds": seeds, "workers": WORKERS,
        }
    )  # fmt: skip
    with links.opened(net, WORKERS) as opened:
        for seed in range(seeds):
            for each in candidates:
                progress(f"training: {each.title}, seed {seed}")
                record.runs.append(execute(RunPlan(TASK, each.spec, seed, network=str(net), workers=WORKERS), opened))
    curves.set_targets(record.runs)
    return record


def results_of(candidates: Sequence[Candidate], record: Record, errors: dict[str, float]) -> list[CandidateResult]:
    rows = {row.scheme: row for row in table.summarise(record)}
    return [CandidateResult(each, rows[each.spec], errors[each.spec]) for each in candidates]


# -- the proxy: error on real gradients ----------------------------------------------------------------------


def task_gradients(task: Task) -> list[list[Named]]:
    """The workers' gradients in consecutive steps of uncompressed training, of the tensors that get compressed."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    shards = [task.dataset.train.shard(worker, WORKERS, seed=0) for worker in range(WORKERS)]
    batches = [shard.batches(task.batch, seed=worker) for worker, shard in enumerate(shards)]
    parameters = dict(model.named_parameters())
    steps = []
    for _ in range(WARM + ROUNDS):
        grads = []
        for batch in batches:
            examples = next(batch)
            loss = task.loss(model(examples.inputs), examples.targets)
            grads.append(dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))
        mean = estimates.mean_of(grads)
        for name, parameter in parameters.items():
            parameter.grad = mean[name]
        optimizer.step()
        steps.append([{name: g for name, g in grad.items() if estimates.compressed(g)} for grad in grads])
    return steps


def mean_vnmse(spec: str, gradients: list[list[Named]]) -> float:
    """|X - Xhat|^2 / |X|^2, the mean over the steps after the first WARM, without error memory."""
    simulation = Simulation(spec, workers=WORKERS, feedback=False)
    errors = [estimates.vnmse(simulation.reduce(grads), estimates.mean_of(grads)) for grads in gradients]
    return sum(errors[WARM:]) / len(errors[WARM:])


# -- tables --------------------------------------------------------------------------------------------------


def _result_table(results: Sequence[CandidateResult], record: Record) -> Listing:
    rows = []
    for each in results:
        row = each.row
        rows.append([
            each.candidate.spec, f"{each.candidate.bits:g}", number_text(row.bytes_per_step, ".3f", 1e-6),
            number_text(row.steps_per_second, ".2f"), number_text(row.encode_seconds, ".1f", 1e3), f"{each.vnmse:.2g}",
            seconds_text(each) if row.runs else f"failed: {row.failures[0]}", score_text(row.metric, row.score),
            times(row.speedup_fp16), times(row.speedup_fp32),
        ])  # fmt: skip
    first = results[0].row
    columns = [
        "scheme", "bits", "MB/step", "steps/s", "encode ms", "vNMSE", "seconds to target", "final", "vs fp16",
        "vs fp32",
    ]  # fmt: skip
    title = f"{TASK}, {table.setting(record)}; target {score_text(first.metric, first.target)}"
    return Listing(title, columns, rows)


def _order_table(results: Sequence[CandidateResult]) -> Listing:
    """Places by each proxy, in the order of seconds to the target."""
    compressed = sorted(compressed_of(results), key=lambda each: each.seconds)
    by_speed = sorted(compressed, key=lambda each: -each.steps_per_second)
    by_error = sorted(compressed, key=lambda each: each.vnmse)
    rows = []
    for place, each in enumerate(compressed, 1):
        reached = str(place) if math.isfinite(each.seconds) else "-"
        rows.append([each.title, reached, str(by_speed.index(each) + 1), str(by_error.index(each) + 1)])
    columns = ["scheme", "by seconds to target", "by steps/s", "by vNMSE"]
    return Listing("The order that proxies predict (- : not always reached)", columns, rows)
