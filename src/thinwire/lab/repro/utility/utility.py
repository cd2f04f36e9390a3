"""Do proxies predict training? Three ladders of design changes, trained once, timed on every link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.lab.network import links
from thinwire.lab.network.network import Network
from thinwire.lab.report import table
from thinwire.lab.repro.claims import Findings, Part, Progress, Stoppable
from thinwire.lab.repro.utility import costs, evaluated, listings, proxies
from thinwire.lab.repro.utility.evaluated import RungResult
from thinwire.lab.repro.utility.ladders import RUNGS, Rung
from thinwire.lab.runs import curves
from thinwire.lab.runs.compare import carry_out
from thinwire.lab.runs.record import CurvePoint, Record, Run, RunPlan
from thinwire.lab.tasks.tasks import load_task

WORKERS = 4
NETWORKS = ("auto:100mbit", "auto:1gbit", "none")
TASK, LATE = "mlp(width=2048, steps=120, evaluate_every=6)", 60
QUICK_TASK, QUICK_LATE = "mlp(width=512, steps=40, evaluate_every=2)", 20
TEXT, TEXT_LATE = "text(steps=600)", 300  # a transformer; the rate falls to zero, so that all end on a plateau
FIRST_SEED = 20  # none below was kept from those who chose the rungs and how a target is set
COUNTS, QUICK_COUNTS = (2, 4, 8), (2, 4)
TURNS = 3  # of the measurements of scaling


def parts(quick: bool, data: Path | None) -> dict[str, Part]:
    """Real runs on the lab's network.

    quick: half of the rungs, a tenth of the model, one link. data: where a text lies, wikitext-2/train.txt; without it
    nothing is trained on text.
    """
    rungs = [rung for rung in RUNGS if rung.quick or not quick]
    task, late, counts = (QUICK_TASK, QUICK_LATE, QUICK_COUNTS) if quick else (TASK, LATE, COUNTS)
    networks = NETWORKS[:1] if quick else NETWORKS
    measured: dict[str, dict[str, tuple[float, float]]] = {}

    def errors(task: str, late: int, data: Path | None, progress: Progress) -> dict[str, tuple[float, float]]:
        """On gradients of the task's model, early and late; measured once for all parts that show them."""
        if task not in measured:
            specs = list(dict.fromkeys(rung.spec for rung in rungs))
            measured[task] = proxies.vnmses(load_task(task, data), specs, late, WORKERS, progress)
        return measured[task]

    def count_costs(found: Findings) -> None:
        with found.stop:
            found.claims += evaluated.error_claims("images", errors(task, late, None, found.progress))
            alike = [rung for rung in rungs if rung.compute == "fp32"]
            model = load_task(task).model()
            found.tables.append(costs.breakdown(alike, model, WORKERS, found.claims, found.progress))
            turns = 1 if quick else TURNS
            found.tables.append(costs.scaling(task, networks[0], counts, turns, found.claims, found.progress))

    def classify(found: Findings) -> None:
        with found.stop:
            known = errors(task, late, None, found.progress)
            record = train(task, None, rungs, networks, found.seeds, found.progress, found.stop)
            tell("images", record, rungs, known, found)

    def read(found: Findings) -> None:
        with found.stop:
            known = errors(TEXT, TEXT_LATE, data, found.progress)
            found.claims += evaluated.error_claims("text", known)
            record = train(TEXT, data, rungs, networks[:1], found.seeds, found.progress, found.stop)
            tell("text", record, rungs, known, found)

    every: dict[str, Part] = {"costs": count_costs, "images": classify}
    return every | {"text": read} if not quick and data is not None and has_text(data) else every


def train(
    task: str,
    data: Path | None,
    rungs: Sequence[Rung],
    networks: Sequence[str],
    seeds: int,
    progress: Progress,
    stop: Stoppable,
) -> Record:
    """Every rung once, then the next seed; each is trained on the loopback and timed on every link."""
    nets = [links.resolved(network, WORKERS) for network in networks]
    plans = [
        RunPlan(task, rung.spec, seed, workers=WORKERS, data=str(data) if data else None, compute=rung.compute)
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for rung in rungs
    ]
    record = _record(task, rungs, nets, seeds)
    with stop:
        carry_out(plans, nets, record, None, lambda runs: Teller(len(runs), progress))
    curves.set_targets(record.runs)
    return record


def _record(task: str, rungs: Sequence[Rung], nets: Sequence[Network], seeds: int) -> Record:
    return Record(
        {
            "tasks": [task], "schemes": [rung.spec for rung in rungs], "exchanges": ["allreduce"],
            "network": ", ".join(map(str, nets)), "why_paced": nets[0].why_paced, "seeds": seeds, "workers": WORKERS,
        }
    )  # fmt: skip


class Teller:
    """Says which of so many runs is under way, and how far it has come."""

    def __init__(self, runs: int, progress: Progress):
        self._runs, self._done, self._progress = runs, 0, progress
        self._steps = 1

    def __enter__(self) -> Teller:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def started(self, steps: int, metric: str) -> None:
        self._steps = steps
        self._progress(f"run {self._done + 1} of {self._runs}")

    def advanced(self, point: CurvePoint) -> None:
        self._progress(f"run {self._done + 1} of {self._runs}: step {point.step} of {self._steps}, {point.score:.3g}")

    def finished(self, run: Run) -> None:
        self._done += 1


def tell(
    part: str,
    record: Record,
    rungs: Sequence[Rung],
    errors: dict[str, tuple[float, float]],
    found: Findings,
) -> None:
    """The claims and the tables of what was trained, link by link, and the runs themselves."""
    if not record.runs:
        return
    found.records[part] = record
    by_link: dict[str, list[RungResult]] = {}
    for each in record.by_network():
        results = results_of(rungs, each, errors)
        by_link[each.runs[0].plan.network] = results
        found.claims += evaluated.claims_of(results, each)
        found.tables.append(listings.result_table(results, each))
        found.tables.append(listings.order_table(results, each))
    found.claims += evaluated.between_links(by_link, record.config["tasks"][0])


def results_of(rungs: Sequence[Rung], record: Record, errors: dict[str, tuple[float, float]]) -> list[RungResult]:
    """Of the rungs that have runs."""
    rows = {row.scheme: row for row in table.summarise(record)}
    runs: dict[str, list[Run]] = {}
    for run in record.runs:
        runs.setdefault(run.plan.name, []).append(run)
    return [
        RungResult(rung, rows[rung.name], errors.get(rung.spec), tuple(runs[rung.name]))
        for rung in rungs
        if rung.name in rows
    ]


def has_text(folder: Path) -> bool:
    return folder.is_file() or any((folder / part / "train.txt").is_file() for part in ("", "wikitext-2"))
