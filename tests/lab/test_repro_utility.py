"""The reproduction's parts: ladders change one thing at a time, claims follow from the runs, real runs give tables."""

from dataclasses import replace

import pytest

from helpers.runs import made_up, record_of
from thinwire.exchange.simulation import Simulation
from thinwire.lab.bench import schemes as bench
from thinwire.lab.repro.claims import Findings, Stoppable
from thinwire.lab.repro.utility import costs, evaluated, ladders, listings, proxies
from thinwire.lab.repro.utility import utility as repro
from thinwire.lab.repro.utility.ladders import BF16, BOTH, CHUNKS, CODED, FP16, FP32, FULL, PARTIAL, PLAIN, RUNGS
from thinwire.lab.runs import curves
from thinwire.lab.runs.record import RunPlan
from thinwire.lab.tasks.tasks import load_task

TINY = "mlp(width=64, steps=4, evaluate_every=2)"


def silent(text):
    pass


def made_up_results(*given):
    """Results of two made-up runs each, which agree: (rung, seconds between evaluated steps, scores, vNMSE), and their
    record."""
    record = record_of(
        *(made_up(rung.spec, seconds, scores, seed=seed) for seed in (0, 1) for rung, seconds, scores, _ in given)
    )
    errors = {rung.spec: (error, error) for rung, *_, error in given}
    return repro.results_of([rung for rung, *_ in given], record, errors), record


def verdicts(results, record):
    """By the claim, without the task and link before it."""
    return {claim.claim.partition(": ")[2]: claim.verdict for claim in evaluated.claims_of(results, record)}


BASELINES = ((FP32, 4.0, [0.8, 0.8], 0.0), (FP16, 2.0, [0.8, 0.8], 1e-7))
FP32_LEVEL = (FP32, 2.0, [0.8, 0.8], 0.0)
SOONER = "TopKC is at the target before Top-k with 16 + 32 bits"


# -- ladders -----------------------------------------------------------------------------------------------------


def test_every_change_is_between_rungs_that_are_run_and_the_ladders_are_those_of_the_paper():
    for change in ladders.CHANGES:
        assert change.before in RUNGS and change.after in RUNGS and change.before.ladder == change.after.ladder
    assert [rung.ladder for rung in RUNGS] == ["baselines"] * 3 + ["Top-k"] * 4 + ["THC"] * 5 + ["PowerSGD"] * 5
    assert len({rung.name for rung in RUNGS}) == len(RUNGS)


@pytest.mark.parametrize("rung", [PLAIN, CODED, CHUNKS, ladders.SHUFFLED], ids=lambda rung: rung.change)
def test_the_sparse_ladder_has_half_a_bit_per_coordinate(rung):
    gradients = next(proxies.task_gradients(load_task("mlp(width=512)"), 1, repro.WORKERS))
    simulation = Simulation(rung.spec, workers=repro.WORKERS)
    simulation.reduce(gradients)
    coordinates = sum(tensor.numel() for tensor in gradients[0].values())
    # How often a worker sends its own message's size: to everybody, or its share by the two halves of an all-reduce.
    passes = repro.WORKERS - 1 if rung.spec.startswith("topk(") else 2 * (repro.WORKERS - 1) / repro.WORKERS
    assert 8 * simulation.bytes_sent / coordinates / passes == pytest.approx(0.5, rel=0.1)


# -- proxies -----------------------------------------------------------------------------------------------------


def test_vnmse_is_measured_on_the_tasks_gradients_early_and_late(monkeypatch):
    monkeypatch.setattr(proxies, "WARM", 1)
    monkeypatch.setattr(proxies, "ROUNDS", 1)
    told = []
    specs = ["fp32", "tnq(bits=8)", "tnq(bits=4)", PLAIN.spec]
    found = proxies.vnmses(load_task("mlp(width=128)"), specs, 5, 2, told.append)
    assert len(told) == 4 and told[-1].endswith("step 7 of 7")
    assert max(found["fp32"]) < 1e-12
    assert 0 < max(found["tnq(bits=8)"]) < min(found["tnq(bits=4)"]) < 0.1
    early, late = found[PLAIN.spec]
    assert 0 < early != late > 0


def test_errors_are_judged_early_and_late():
    errors = {CODED.spec: (0.3, 0.3), CHUNKS.spec: (0.4, 0.2), PARTIAL.spec: (0.012, 0.012), FULL.spec: (0.01, 0.01)}
    chunks, rotation = evaluated.error_claims("mlp", errors)
    assert chunks.verdict == "fails"  # late it is the other way round
    assert rotation.verdict == "holds" and rotation.expected == "1.25x at most"
    [_, rotation] = evaluated.error_claims("mlp", {**errors, PARTIAL.spec: (0.012, 0.013)})
    assert rotation.verdict == "fails" and rotation.why_not and "block by block" in rotation.why_not


def test_images_and_text_are_judged_on_gradients_of_their_own_by_all_rungs(monkeypatch, tmp_path):
    (tmp_path / "train.txt").write_text("a text. " * 200)
    errors = {
        "mlp": {CODED.spec: (0.3, 0.3), CHUNKS.spec: (0.4, 0.4)},
        "text": {CODED.spec: (0.4, 0.4), CHUNKS.spec: (0.3, 0.3)},
    }
    trained, shown = [], []

    def train(task, data, rungs, networks, seeds, progress, stop):
        trained.append((task.partition("(")[0], data, rungs, len(networks)))
        return record_of()

    monkeypatch.setattr(proxies, "vnmses", lambda task, *_: errors[task.name])
    monkeypatch.setattr(repro, "train", train)
    monkeypatch.setattr(repro, "tell", lambda part, record, rungs, known, found: shown.append((part, known)))
    monkeypatch.setattr(costs, "breakdown", lambda *_: None)
    monkeypatch.setattr(costs, "scaling", lambda *_: None)
    found = Findings(1, silent)
    for part in repro.parts(False, tmp_path).values():
        part(found)
    assert trained == [("mlp", None, list(RUNGS), 3), ("text", tmp_path, list(RUNGS), 1)]
    assert shown == [("images", errors["mlp"]), ("text", errors["text"])]
    assert [(claim.claim.partition(":")[0], claim.verdict) for claim in found.claims] == [
        ("vNMSE, images", "holds"), ("vNMSE, text", "fails"),
    ]  # fmt: skip
    assert list(repro.parts(True, tmp_path)) == list(repro.parts(False, None)) == ["costs", "images"]


# -- claims ------------------------------------------------------------------------------------------------------


def test_fp32_is_a_weak_baseline_only_where_the_seeds_agree():
    def verdict(*fp16_seconds):
        runs = [made_up("fp32", 2.2, [0.8, 0.8], seed=seed) for seed in range(len(fp16_seconds))]
        runs += [made_up("fp16", seconds, [0.8, 0.8], seed=seed) for seed, seconds in enumerate(fp16_seconds)]
        runs += [made_up(CHUNKS.spec, 1.0, [0.8, 0.8], seed=seed) for seed in range(len(fp16_seconds))]
        record = record_of(*runs)
        results = repro.results_of([FP32, FP16, CHUNKS], record, {})
        return next(c.verdict for c in evaluated.claims_of(results, record) if "weak baseline" in c.claim)

    assert verdict(1.0, 1.05, 0.95) == "holds"
    assert verdict(1.0, 2.9, 1.2) == "level"
    assert verdict(2.1, 2.15, 2.12) == "fails"


def test_sooner_is_decided_by_seconds_not_by_proxies():
    """Chunks make more steps and have more error; what counts is when they arrive."""
    at_once = verdicts(*made_up_results(*BASELINES, (PLAIN, 1.0, [0.8, 0.8], 0.3), (CHUNKS, 0.5, [0.8, 0.8], 0.4)))
    too_late = verdicts(*made_up_results(*BASELINES, (PLAIN, 1.0, [0.8, 0.8], 0.3), (CHUNKS, 0.5, [0.5, 0.6], 0.4)))
    assert at_once[SOONER] == "holds" and too_late[SOONER] == "fails"
    throughput, vnmse = (
        f"{proxy} puts pairs of schemes in another order than seconds to the target"
        for proxy in ("throughput", "vNMSE")
    )
    assert (at_once[throughput], at_once[vnmse]) == ("fails", "holds")
    assert (too_late[throughput], too_late[vnmse]) == ("holds", "fails")


def test_what_seeds_cannot_tell_is_level():
    """Seconds that lie apart in one order and in the other; and of two that never arrive neither is sooner."""
    rungs = {FP32: (4.0, 4.0), FP16: (2.0, 2.0), PLAIN: (1.0, 2.0), CHUNKS: (2.0, 1.0)}
    record = record_of(
        *(made_up(rung.spec, seconds, [0.8], seed=seed) for rung, each in rungs.items()
          for seed, seconds in enumerate(each))
    )  # fmt: skip
    results = repro.results_of(list(rungs), record, {})
    assert verdicts(results, record)[SOONER] == "level"
    assert {claim.source for claim in evaluated.claims_of(results, record)} <= {"paper", "ours"}
    neither = made_up_results(*BASELINES, (PLAIN, 1.0, [0.1], 0.3), (CHUNKS, 0.5, [0.1], 0.4))
    assert verdicts(*neither)[SOONER] == "level"


def test_who_leads_early_and_ends_lower_is_found():
    """Both chunks are ahead after a quarter of fp16's seconds; only one of them ends lower."""
    slow = [0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9]
    fast = [0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8]
    early = "some schemes lead early and end lower than fp16"
    results, record = made_up_results(
        (FP16, 4.0, slow, 0.0),
        (CHUNKS, 1.0, fast, 0.4),
        (PARTIAL, 1.0, [*fast[:-1], 0.95], 0.1),
        (BOTH, 9.0, slow, 0.1),
    )
    [claim] = (claim for claim in evaluated.claims_of(results, record) if early in claim.claim)
    assert claim.verdict == "holds" and claim.measured == f"1 of 2 that lead: {CHUNKS.spec}"
    level = made_up_results((FP16, 4.0, slow, 0.0), (CHUNKS, 1.0, [*fast[:-1], 0.9], 0.4))
    assert verdicts(*level)[early] == "fails"
    record = record_of(made_up(FP16.spec, 4.0, slow), made_up(CHUNKS.spec, 1.0, fast))
    alone = repro.results_of([FP16, CHUNKS], record, {})
    assert verdicts(alone, record)[early] == "level"  # one run does not tell how another would end


def test_the_baseline_in_16_bits_of_computing_is_a_row_and_never_the_baseline():
    wire, both = (RunPlan("mlp", "fp16", 0, compute=compute) for compute in ("fp32", "bf16"))
    assert curves.baseline_plan(wire) and not curves.baseline_plan(both)
    assert both.name == BF16.name != wire.name


def test_fewer_pay_on_faster_links():
    slow, _ = made_up_results(*BASELINES, (PLAIN, 1.0, [0.8, 0.8], 0.3), (CHUNKS, 0.5, [0.8, 0.8], 0.4))
    fast, _ = made_up_results(*BASELINES, (PLAIN, 3.0, [0.8, 0.8], 0.3), (CHUNKS, 0.5, [0.8, 0.8], 0.4))
    [claim] = evaluated.between_links({"100mbit": slow, "none": fast}, "mlp(width=2)")
    assert claim.verdict == "holds" and claim.measured == "2 on 100mbit, 1 on loopback"
    [claim] = evaluated.between_links({"100mbit": fast, "none": slow}, "mlp(width=2)")
    assert claim.verdict == "fails"


def test_what_does_not_hold_says_why_by_what_was_measured():
    def why(results, record, start):
        [claim] = (claim for claim in evaluated.claims_of(results, record) if start in claim.claim)
        assert claim.verdict != "holds"
        return claim.why_not

    chunks_late = made_up_results(*BASELINES, (PLAIN, 1.0, [0.8, 0.8], 0.3), (CHUNKS, 0.5, [0.5, 0.6], 0.4))
    assert why(*chunks_late, SOONER) == "a step takes 50 against 100 ms, and the end is 60.0% against 80.0%"
    assert why(*chunks_late, "not against fp16") == "all that pay do so by 2.00x or more against fp16, too"
    nobody = made_up_results(FP32_LEVEL, BASELINES[1], (CHUNKS, 9.0, [0.8, 0.8], 0.4))
    assert why(*nobody, "lead early") == "nobody is ahead of fp16 so early"
    assert why(*nobody, "not against fp16").endswith("the wire takes: under fp16 140 of 200")
    assert why(*nobody, "weak baseline").endswith("the wire takes: under fp32 140 of 200, under fp16 140 of 200")
    rising = [0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9]
    leading = made_up_results((FP16, 4.0, rising, 0.0), (CHUNKS, 1.0, [0.5] * 7 + [0.95], 0.4))
    assert why(*leading, "lead early") == f"the ends of those that lead, against fp16: {CHUNKS.spec} +5.0 ±0.0"
    [claim] = evaluated.between_links({"100mbit": nobody[0], "none": chunks_late[0]}, "mlp(width=2)")
    assert claim.why_not and claim.why_not.endswith("on 100mbit 140 of 200, on loopback 140 of 200")
    broken = record_of(*(made_up(spec, 1.0, [0.8]) for spec in ("fp32", "fp16", PLAIN.spec)),
                       made_up(CHUNKS.spec, 1.0, [0.8], reason="broke"))  # fmt: skip
    assert why(repro.results_of([FP32, FP16, PLAIN, CHUNKS], broken, {}), broken, SOONER) == "failed: broke"


def test_a_failed_run_is_the_last_and_is_shown():
    record = record_of(
        *(made_up(rung.spec, 1.0, [0.8]) for rung in (FP32, FP16, CHUNKS)),
        made_up(PLAIN.spec, 1.0, [0.8], reason="broke"),
    )
    results = repro.results_of([FP32, FP16, PLAIN, CHUNKS], record, {})
    assert verdicts(results, record)[SOONER] == "holds"
    table = listings.result_table(results, record)
    assert "failed: broke" in table.rows[2] and all(len(row) == len(table.columns) for row in table.rows)
    order = listings.order_table(results, record)
    assert [row[:2] for row in order.rows] == [[CHUNKS.title, "1"], [PLAIN.title, "-"]]


# -- costs -------------------------------------------------------------------------------------------------------


def test_growth_is_held_to_its_law():
    sent = {(PLAIN, 2): [1.0], (PLAIN, 8): [7.1], (CHUNKS, 2): [1.0], (CHUNKS, 8): [1.75]}
    seconds = {(PLAIN, 2): [1.0] * 2, (PLAIN, 8): [3.0] * 2, (CHUNKS, 2): [1.0] * 2, (CHUNKS, 8): [2.0] * 2}
    assert [claim.verdict for claim in costs.scaling_claims(sent, seconds, (2, 8))] == ["holds"] * 3
    sent[PLAIN, 8], seconds[CHUNKS, 8] = [1.75], [4.0] * 2
    assert [claim.verdict for claim in costs.scaling_claims(sent, seconds, (2, 8))] == ["fails", "holds", "fails"]


def test_the_rotations_arithmetic_is_judged_by_its_spread():
    assert costs.rotation_claim([3.0, 3.1, 3.0], [2.0, 2.1, 2.0]).verdict == "holds"
    assert costs.rotation_claim([3.0, 1.0, 2.0], [2.0, 2.1, 2.0]).verdict == "level"


def test_a_breakdown_has_a_row_for_every_rung(monkeypatch):
    monkeypatch.setattr(costs, "REPEATS", 1)
    monkeypatch.setattr(costs, "TIMES", 1)
    claims = []
    model = load_task("mlp(width=64)").model()
    listing = costs.breakdown([FULL, PARTIAL, CHUNKS], model, 2, claims, silent)
    assert [row[0] for row in listing.rows] == [FULL.name, PARTIAL.name, CHUNKS.name] and len(claims) == 1
    assert all(len(row) == len(listing.columns) for row in listing.rows) and set(listing.columns[2:]) <= set(
        bench.OPERATIONS
    )


# -- real runs ---------------------------------------------------------------------------------------------------


def test_real_runs_from_start_to_end(monkeypatch):
    monkeypatch.setattr(repro, "WORKERS", 2)
    told, stop = [], Stoppable()
    record = repro.train(TINY, None, (FP32, FP16, BF16, CHUNKS), ("none",), 1, told.append, stop)
    assert [run.reason for run in record.runs] == [None] * 4 and told[0] == "run 1 of 4" and not stop.stopped
    fp16, bf16 = record.runs[1:3]
    assert fp16.totals["bytes_sent"] == bf16.totals["bytes_sent"] and fp16.curve[-1].loss != bf16.curve[-1].loss
    found = Findings(1, silent)
    repro.tell("images", record, (FP32, FP16, BF16, CHUNKS), {}, found)
    assert found.reproduction.as_json()["records"] == {"images": record.as_json()}
    assert [row[1] for row in found.tables[0].rows] == [FP32.name, FP16.name, BF16.name, CHUNKS.name]
    assert any("computing in 16 bits" in claim.claim for claim in found.claims)


def test_ctrl_c_keeps_what_is_finished(monkeypatch):
    def carried_out(plans, nets, record, json, watched):
        record.runs.append(replace(made_up("fp16", 1.0, [0.5, 0.8]), plan=plans[1]))
        raise KeyboardInterrupt

    monkeypatch.setattr(repro, "carry_out", carried_out)
    stop = Stoppable()
    record = repro.train(TINY, None, (FP32, FP16), ("none",), 1, silent, stop)
    assert stop.stopped and len(record.runs) == 1
    found = Findings(1, silent)
    repro.tell("images", record, (FP32, FP16), {}, found)
    assert [row[1] for row in found.tables[0].rows] == ["fp16"]
