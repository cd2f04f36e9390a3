"""From runs to verdicts, on made-up runs."""

import io

from rich.console import Console

from helpers.runs import FP16, made_up, record_of
from thinwire.lab.report import table


def rows_of(*runs):
    return {row.label: row for row in table.summarise(record_of(*runs))}


def test_speedups_are_ratios_of_seconds_to_target():
    rows = rows_of(FP16, made_up("fp32", 4.0, [0.5, 0.8, 0.85]), made_up("quick", 0.5, [0.5, 0.7, 0.85]))
    assert rows["fp16"].mean_seconds == 4.0 and rows["quick"].mean_seconds == 1.5
    assert rows["quick"].speedup_fp16 == 4.0 / 1.5 and rows["quick"].speedup_fp32 == 8.0 / 1.5
    assert rows["fp32"].speedup_fp16 == 0.5
    assert rows["quick"].steps_per_second == 20 and rows["quick"].bytes_per_step == 1e5


def test_verdicts_tell_the_truth():
    rows = rows_of(
        FP16,
        made_up("pays", 0.5, [0.5, 0.8, 0.85]),
        made_up("worse", 0.5, [0.5, 0.8, 0.82]),
        made_up("same", 1.95, [0.5, 0.8, 0.85]),
        made_up("slow", 4.0, [0.5, 0.8, 0.85]),
        made_up("never", 0.5, [0.5, 0.6, 0.7]),
        made_up("broken", 0.5, [0.5], reason="worker 1 was killed by SIGKILL"),
    )
    assert rows["fp16"].verdict == "The baseline: the target of 80.0% after 4.0 s."
    assert rows["pays"].verdict.startswith("Pays here") and "4.0x sooner" in rows["pays"].verdict
    assert "ends 3.0 points lower" in rows["worse"].verdict
    for scheme in ("same", "slow", "never"):
        assert rows[scheme].verdict.startswith("Does not pay here")
    assert "2.0x later" in rows["slow"].verdict and "wire" in rows["slow"].verdict
    assert rows["broken"].verdict == "Failed: worker 1 was killed by SIGKILL."


def test_a_seed_that_misses_the_target_spoils_the_mean():
    rows = rows_of(FP16, made_up("wobbly", 0.5, [0.9]), made_up("wobbly", 0.5, [0.7], seed=1))
    assert rows["wobbly"].mean_seconds is None and rows["wobbly"].speedup_fp16 is None
    assert "only 1 of 2 runs" in rows["wobbly"].verdict
    assert table.target_text(rows["wobbly"]) == "not reached"


def test_mean_and_spread_over_seeds():
    rows = rows_of(made_up("fp16", 1.0, [0.9]), made_up("fp16", 3.0, [0.9], seed=1))
    assert table.target_text(rows["fp16"]) == "2.0 ±1.4"


def test_metrics_that_fall():
    base = made_up("fp16", 2.0, [0.5, 0.2, 0.10], target=0.25, metric="squared error", rising=False)
    quick = made_up("quick", 0.5, [0.5, 0.2, 0.11], target=0.25, metric="squared error", rising=False)
    rows = rows_of(base, quick)
    assert rows["quick"].speedup_fp16 == 4.0
    assert "at 0.11 instead of 0.1" in rows["quick"].verdict


def test_every_exchange_is_held_against_fp16_over_allreduce():
    rows = rows_of(
        FP16,
        made_up("fp16", 4.0, [0.5, 0.8, 0.85], exchange="server(servers=2)"),
        made_up("powergossip", 0.5, [0.5, 0.8, 0.85], exchange="gossip"),
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
    record = record_of(FP16, made_up(long, 0.5, [0.9]), made_up("broken", 1.0, [0.1], reason="it broke"))
    console = Console(width=80, file=io.StringIO())
    console.print(table.comparison_table(record, table.summarise(record)))
    shown = console.file.getvalue()
    assert "…" not in shown
    for text in ("fp16", "powersgd", "(factor_rank", "failed", "8.00x", "90.0%", "10+5+35", "1e-02"):
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
