"""The reproduction's parts: bits are matched, claims follow from the runs, and real runs give a table."""

from dataclasses import replace

import pytest

from helpers.runs import made_up, record_of
from thinwire.exchange.simulation import Simulation
from thinwire.lab.network.network import parse_network
from thinwire.lab.repro import utility as repro
from thinwire.lab.tasks.tasks import load_task

TINY = "mlp(width=64, steps=4, evaluate_every=2)"


def candidate(spec):
    [found] = (each for each in repro.CANDIDATES if each.spec == spec)
    return found


def made_up_results(*given):
    """Results of made-up runs: (spec, seconds between evaluated steps, scores, vNMSE)."""
    record = record_of(*(made_up(spec, seconds, scores) for spec, seconds, scores, _ in given))
    return repro.results_of([candidate(spec) for spec, *_ in given], record, {spec: error for spec, *_, error in given})


def holding(results):
    return {claim.claim: claim.holds for claim in repro.claims_of(results)}


FP32, FP16 = ("fp32", 4.0, [0.8, 0.8], 0.0), ("fp16", 2.0, [0.8, 0.8], 1e-7)
TOPK, TOPKC = "topk(density=0.0215)", "topkc(density=0.0234, chunk=128)"


@pytest.fixture(scope="module")
def gradients():
    return repro.task_gradients(load_task(repro.TASK))


@pytest.mark.parametrize("each", repro.CANDIDATES, ids=lambda each: each.title)
def test_bits_per_coordinate_are_what_the_table_says(each, gradients):
    simulation = Simulation(each.spec, workers=repro.WORKERS)
    simulation.reduce(gradients[0])
    coordinates = sum(tensor.numel() for tensor in gradients[0][0].values())
    # How often a worker sends its own message's size: to everybody, or its share by the two halves of an all-reduce.
    passes = repro.WORKERS - 1 if each.name == repro.TOPK else 2 * (repro.WORKERS - 1) / repro.WORKERS
    assert 8 * simulation.bytes_sent / coordinates / passes == pytest.approx(each.bits, rel=0.1)


def test_vnmse_is_measured_on_the_tasks_gradients(gradients):
    assert repro.mean_vnmse("fp32", gradients) < 1e-12
    fine, coarse = (repro.mean_vnmse(f"tnq(bits={bits})", gradients) for bits in (8, 4))
    assert 0 < fine < coarse < 0.1


def test_sooner_is_decided_by_seconds_not_by_proxies():
    """Chunks make more steps and have more error; what counts is when they arrive."""
    at_once = holding(made_up_results(FP32, FP16, (TOPK, 1.0, [0.8, 0.8], 0.3), (TOPKC, 0.5, [0.8, 0.8], 0.4)))
    too_late = holding(made_up_results(FP32, FP16, (TOPK, 1.0, [0.8, 0.8], 0.3), (TOPKC, 0.5, [0.5, 0.6], 0.4)))
    for said in (at_once, too_late):
        assert said["0.5 bits: Top-k has less vNMSE than TopKC"]
        assert said["0.5 bits: TopKC makes more steps a second than Top-k"]
    sooner = "0.5 bits: TopKC reaches the target sooner than Top-k"
    assert at_once[sooner] and not too_late[sooner]
    last = "the scheme with the {} is not the first at the target"
    assert at_once[last.format("least vNMSE")] and not at_once[last.format("most steps a second")]
    assert not too_late[last.format("least vNMSE")] and too_late[last.format("most steps a second")]


def test_what_seeds_cannot_tell_is_level():
    """Seconds that lie apart in one order and in the other; and of two that never arrive neither is sooner."""
    record = record_of(
        *(made_up(spec, seconds, [0.8], seed=seed) for spec, each in {
            "fp32": (4.0, 4.0), "fp16": (2.0, 2.0), TOPK: (1.0, 2.0), TOPKC: (2.0, 1.0)
        }.items() for seed, seconds in enumerate(each))
    )  # fmt: skip
    candidates = [candidate(spec) for spec in ("fp32", "fp16", TOPK, TOPKC)]
    results = repro.results_of(candidates, record, dict.fromkeys(("fp32", "fp16", TOPK, TOPKC), 0.1))
    verdicts = {claim.claim: claim.verdict for claim in repro.claims_of(results)}
    assert verdicts["0.5 bits: TopKC reaches the target sooner than Top-k"] == "level"
    assert {claim.source for claim in repro.claims_of(results)} <= {"paper", "ours"}
    neither = made_up_results(FP32, FP16, (TOPK, 1.0, [0.1], 0.3), (TOPKC, 0.5, [0.1], 0.4))
    verdicts = {claim.claim: claim.verdict for claim in repro.claims_of(neither)}
    assert verdicts["0.5 bits: TopKC reaches the target sooner than Top-k"] == "level"


def test_pairs_in_another_order_are_counted():
    results = made_up_results(
        FP32, FP16, (TOPK, 1.0, [0.8], 0.3), (TOPKC, 2.0, [0.8], 0.2), ("tnq(bits=4)", 3.0, [0.8], 0.1),
        ("tnq(bits=2)", 0.5, [0.1], 0.4), ("tnq(bits=8)", 0.4, [0.1], 0.5),
    )  # fmt: skip
    measured = {claim.claim.split()[0]: claim.measured for claim in repro.claims_of(results)}
    # Nine pairs have an order: two never arrive. Error misorders the three that arrive, speed those two against all.
    assert measured["vNMSE"] == "3 of 9 pairs" and measured["throughput"] == "6 of 9 pairs"


def test_saturation_and_rotation_are_held_to_their_numbers():
    wide, narrow, full = (f"thc(bits=4, rotate={rest})" for rest in ("10", "10, saturate=True", "30"))
    results = made_up_results(
        FP32, FP16, (wide, 1.0, [0.8], 0.0168), (narrow, 0.7, [0.8], 0.065), (full, 1.3, [0.8], 0.0138)
    )
    sizes = {wide: 6.0e5, narrow: 4.0e5}
    results = [replace(each, row=replace(each.row, bytes_per_step=sizes.get(each.row.scheme, 1e6))) for each in results]
    said = holding(results)
    assert said["THC, 4-bit integers: saturation sends fewer bytes"]
    assert said["THC, 4-bit integers: saturation reaches the target sooner"]
    assert said["THC: the partial rotation has about the vNMSE of the full one"]
    assert said["THC: the partial rotation spends less time on encoding than the full one"]


def test_a_failed_run_is_the_worst_and_is_shown():
    record = record_of(
        *(made_up(spec, 1.0, [0.8]) for spec in ("fp32", "fp16", TOPKC)), made_up(TOPK, 1.0, [0.8], reason="it broke")
    )
    candidates = [candidate(spec) for spec in ("fp32", "fp16", TOPK, TOPKC)]
    results = repro.results_of(candidates, record, dict.fromkeys(("fp32", "fp16", TOPK, TOPKC), 0.1))
    assert holding(results)["0.5 bits: TopKC reaches the target sooner than Top-k"]
    table = repro._result_table(results, record)
    assert "failed: it broke" in table.rows[2] and all(len(row) == len(table.columns) for row in table.rows)
    order = repro._order_table(results)
    assert [row[:2] for row in order.rows] == [["TopKC, 0.5 bits", "1"], ["Top-k, 0.5 bits", "-"]]


def test_real_runs_from_start_to_end(monkeypatch):
    monkeypatch.setattr(repro, "TASK", TINY)
    monkeypatch.setattr(repro, "WORKERS", 2)
    candidates = [candidate(spec) for spec in ("fp32", "fp16", TOPKC)]
    told = []
    record = repro.train_all(candidates, parse_network("none"), 1, told.append)
    assert [run.reason for run in record.runs] == [None] * 3 and len(told) == 3
    results = repro.results_of(candidates, record, dict.fromkeys(("fp32", "fp16", TOPKC), 0.1))
    assert repro.claims_of(results)
    assert repro._result_table(results, record).rows[0][0] == "fp32"
