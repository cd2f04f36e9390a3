"""From runs to verdicts, on made-up runs."""

import io

from rich.console import Console

from helpers.runs import FP16, made_up, record_of
from thinwire.lab.report import table


def rows_of(*runs):
    return {row.label: row for row in table.summarise(record_of(*runs))}


def several(scheme, seconds, scores, ends=(0.0, 0.002, 0.004), **options):
    """A run for each of a few seeds, which differ a little in what they end with."""
    runs = [made_up(scheme, seconds, scores, seed=seed, **options) for seed in range(len(ends))]
    for run, more in zip(runs, ends, strict=True):
        run.final = scores[-1] + more
    return runs


CURVE = [0.5, 0.7, 0.8, 0.8, 0.8, 0.85]  # means of three: .667, .767, .8, .817


def test_speedups_are_ratios_of_seconds_to_target():
    rows = rows_of(made_up("fp16", 2.0, CURVE), made_up("fp32", 4.0, CURVE), made_up("quick", 0.5, CURVE))
    assert rows["fp16"].mean_seconds == 10.0 and rows["quick"].mean_seconds == 2.5
    assert rows["quick"].speedup_fp16 == 4.0 and rows["quick"].speedup_fp32 == 8.0
    assert rows["fp32"].speedup_fp16 == 0.5
    assert rows["quick"].steps_per_second == 20 and rows["quick"].bytes_per_step == 1e5


def test_verdicts_tell_the_truth():
    rows = rows_of(
        *several("fp16", 2.0, CURVE),
        *several("pays", 0.5, CURVE),
        *several("worse", 0.5, CURVE, ends=(-0.03, -0.028, -0.029)),
        *several("same", 1.95, CURVE),
        *several("slow", 4.0, CURVE),
        *several("never", 0.5, [0.5, 0.6, 0.7]),
        made_up("broken", 0.5, [0.5], reason="worker 1 was killed by SIGKILL"),
    )
    assert rows["fp16"].verdict == "The baseline: the target of 80.0% after 10.0 s."
    assert rows["pays"].verdict == (
        "Pays here: reaches the target of 80.0% 4.0x (4.0 to 4.0) sooner than fp16, and ends level (+0.0 ±0.0 points)."
    )
    assert rows["worse"].verdict.startswith("Sooner, but worse: ") and "ends worse (-3.1 ±" in rows["worse"].verdict
    assert rows["same"].verdict.startswith("Level here: ")
    assert rows["slow"].verdict.startswith("Does not pay here: ")
    assert "2.0x (2.0 to 2.0) later" in rows["slow"].verdict and "wire" in rows["slow"].verdict
    assert rows["never"].verdict.startswith(
        "Does not pay here: held the target of 80.0% in 0 of 3 runs, and ends worse"
    )
    assert rows["broken"].verdict == "Failed: worker 1 was killed by SIGKILL."


def test_what_seeds_cannot_tell_is_left_open():
    open_end = rows_of(*several("fp16", 2.0, CURVE), *several("x", 0.5, CURVE, ends=(-0.02, 0.03, -0.01)))["x"]
    assert (
        open_end.verdict.startswith("Sooner; whether as good is open: ") and "how it ends is open" in open_end.verdict
    )
    paces = [run for seconds, seed in ((0.4, 0), (3.0, 1)) for run in [made_up("x", seconds, CURVE, seed=seed)]]
    open_pace = rows_of(*several("fp16", 2.0, CURVE, ends=(0.0, 0.0)), *paces)["x"]
    assert open_pace.verdict.startswith("Open: ")


def test_who_surely_ends_no_more_than_half_a_point_lower_is_as_good():
    """However much higher it may end; +0.3 +-0.5 points here, and a little lower it is open."""

    def verdict(ends):
        return rows_of(*several("fp16", 2.0, CURVE), *several("x", 0.5, CURVE, ends=ends))["x"].verdict

    assert verdict((0.001, 0.005, 0.009)).startswith("Pays here: ")
    assert "ends no worse (+0.3 ±0.5 points)" in verdict((0.001, 0.005, 0.009))
    assert verdict((-0.005, -0.001, 0.003)).startswith("Sooner; whether as good is open: ")


def test_who_ends_as_good_in_fewer_seconds_is_never_said_not_to_pay():
    almost = [0.5, 0.7, 0.78, 0.79, 0.79, 0.79]  # whose rolling mean never gets to .8
    row = rows_of(*several("fp16", 2.0, CURVE), *several("x", 0.5, almost, ends=(0.06, 0.062, 0.064)))["x"]
    assert row.mean_seconds is None
    assert row.verdict.startswith("Pays here: takes 4.0x (4.0 to 4.0) fewer seconds than fp16 for all steps")
    assert "ends level" in row.verdict and "0 of 3 runs" in row.verdict


def test_one_seed_has_no_interval_and_says_so():
    rows = rows_of(made_up("fp16", 2.0, CURVE), made_up("pays", 0.5, CURVE))
    assert rows["pays"].verdict == (
        "Pays here: reaches the target of 80.0% 4.0x sooner than fp16, and ends level (+0.0 points, one seed)."
    )


def test_what_diverged_is_said_to_have():
    row = rows_of(*several("fp16", 2.0, CURVE), *several("x", 0.5, [0.5, float("nan"), float("nan")]))["x"]
    assert row.verdict == "Does not pay here: held the target of 80.0% in 0 of 3 runs, and diverged."


def test_a_seed_that_misses_the_target_spoils_the_mean():
    rows = rows_of(FP16, made_up("wobbly", 0.5, [0.9]), made_up("wobbly", 0.5, [0.7], seed=1))
    assert rows["wobbly"].mean_seconds is None and rows["wobbly"].speedup_fp16 is None
    assert "in 1 of 2 runs" in rows["wobbly"].verdict
    assert table.target_text(rows["wobbly"]) == "not reached"


def test_mean_and_spread_over_seeds():
    rows = rows_of(made_up("fp16", 1.0, [0.9]), made_up("fp16", 3.0, [0.9], seed=1))
    assert table.target_text(rows["fp16"]) == "2.0 ±1.4"


def test_metrics_that_fall():
    falling = {"target": 0.3, "metric": "squared error", "rising": False}
    rows = rows_of(
        made_up("fp16", 2.0, [0.5, 0.2, 0.10], **falling), made_up("quick", 0.5, [0.5, 0.2, 0.11], **falling)
    )
    assert rows["quick"].speedup_fp16 == 4.0
    assert "ends worse (+0.01 squared error, one seed)" in rows["quick"].verdict


def test_every_exchange_is_held_against_fp16_over_allreduce():
    rows = rows_of(
        FP16,
        made_up("fp16", 4.0, [0.5, 0.8, 1.1], exchange="server(servers=2)"),
        made_up("powergossip", 0.5, [0.5, 0.8, 1.1], exchange="gossip"),
    )
    assert rows["fp16 over allreduce"].verdict.startswith("The baseline")
    served = rows["fp16 over server(servers=2)"]
    assert served.speedup_fp16 == 0.5 and "2.0x later than fp16 over allreduce" in served.verdict
    assert rows["powergossip over gossip"].speedup_fp16 == 4.0


def test_without_a_baseline_there_is_no_verdict_and_the_table_says_so():
    record = record_of(made_up("dpsgd", 1.0, [0.9], exchange="gossip"))
    (row,) = table.summarise(record)
    assert "no verdict" in row.verdict and row.speedup_fp16 is None
    assert "no baseline: fp16 over allreduce was not run" in table.caption(record)


def test_counted_bytes_are_held_against_the_interfaces():
    few, many = made_up("fp16", 1.0, [0.9]), made_up("chatty", 1.0, [0.9])
    few.totals |= {"ledger_bytes": 1e6, "ledger_overhead_bytes": 2e4, "interface_payload_bytes": 1.02e6}
    many.totals |= {"ledger_bytes": 1e6, "ledger_overhead_bytes": 1e6, "interface_payload_bytes": 2.2e6}
    assert table.surplus(few) == 0 and round(table.surplus(many), 9) == 0.1
    assert "at most +10.0%, under chatty" in table.caption(record_of(few, many))


def test_the_table_fits_a_terminal_and_shows_every_row():
    long = "powersgd(factor_rank=4, sided='one')"
    record = record_of(FP16, made_up(long, 0.5, [0.9, 0.9, 0.9]), made_up("broken", 1.0, [0.1], reason="it broke"))
    console = Console(width=80, file=io.StringIO())
    console.print(table.comparison_table(record, table.summarise(record)))
    shown = console.file.getvalue()
    assert "…" not in shown
    for text in ("fp16", "powersgd", "(factor_rank", "failed", "4.00x", "90.0%", "10+5+35", "1e-02"):
        assert text in shown


def test_the_table_names_exchange_and_controller():
    record = record_of(
        FP16,
        made_up("fp16", 4.0, [0.9], exchange='server(servers=2, down="fp16")'),
        made_up("qsgd(bits=4)", 1.0, [0.9], controller="mqgrad(interval=5)", exchange="server"),
    )
    console = Console(width=80, file=io.StringIO())
    console.print(table.comparison_table(record, table.summarise(record)))
    shown = console.file.getvalue()
    assert "…" not in shown
    for text in ("over", "allreduce", "(servers=2", "by mqgrad"):
        assert text in shown
