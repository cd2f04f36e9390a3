"""--tune: every row's learning rate, from one grid, on other seeds, without the test examples."""

import io
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from helpers.runs import made_up
from thinwire.lab.report import table
from thinwire.lab.report.report import write_report
from thinwire.lab.runs import compare as module
from thinwire.lab.runs import tune
from thinwire.lab.runs.record import Record, RunPlan
from thinwire.lab.runs.run import execute
from thinwire.lab.tasks import rates
from thinwire.lab.tasks.tasks import TASKS, load_task


def test_the_baseline_is_first_and_no_test_example_is_looked_at():
    plans = [RunPlan("mlp", scheme, seed) for seed in (0, 1) for scheme in ("qsgd", "fp16")]
    trials = tune.tuning(plans)
    assert len(trials) == 2 * len(tune.MIDDLE) and trials[0].scheme == "fp16"
    assert not any(trial.tested for trial in trials)
    assert {trial.seed for trial in trials} == {tune.SEEDS[0]} and min(tune.SEEDS) >= 10


def test_the_best_rate_is_chosen_and_an_edge_is_named():
    def row(scores, rising=True):
        trials = {rate: (score, score) for rate, score in zip((0.5, 1.0, 2.0), scores, strict=True)}
        return tune.Tuned(("mlp", "allreduce", "x"), rising, "accuracy", trials)

    assert row([0.7, 0.8, math.nan]).rate == 1.0 and not row([0.7, 0.8, 0.75]).at_the_edge
    assert row([0.7, 0.8, 0.9]).rate == 2.0 and row([0.7, 0.8, 0.9]).at_the_edge
    assert row([0.7, 0.8, 0.9], rising=False).rate == 0.5
    assert row([0.8, 0.8, 0.8]).rate == 1.0


def climbed(score):
    """The trials of a row whose runs end with `score(rate, seed)`, round by round."""
    found, runs, rounds = [], [], []
    while trials := tune.tuning([RunPlan("mlp", "fp16", 0)], found):
        scores = [score(trial.rate, trial.seed) for trial in trials]
        runs += [replace(made_up("fp16", 1.0, [s] * 3), plan=trial) for s, trial in zip(scores, trials, strict=True)]
        found, rounds = tune.tuned(runs), [*rounds, [(trial.rate, trial.seed) for trial in trials]]
    [row] = found
    assert len(runs) == len({(run.plan.seed, run.plan.rate) for run in runs})  # none is made twice
    return row, rounds


@pytest.mark.parametrize("best", tune.GRID)
def test_a_row_climbs_to_its_best_rate_and_no_further(best):
    row, rounds = climbed(lambda rate, seed: 0.9 - 0.1 * abs(math.log(rate / best)))
    assert row.rate == best and row.at_the_edge == (best in (tune.GRID[0], tune.GRID[-1]))
    assert set(row.trials) == {r for r in tune.GRID if r in tune.MIDDLE or min(best, 1) / 2 <= r <= max(best, 1) * 2}
    assert len(rounds) == 1 + len(row.trials) - len(tune.MIDDLE)
    assert {len(found) for found in row.trials.values()} == {1}  # who has no rival needs no other seed


def test_rates_that_are_near_the_best_have_every_seed_and_may_win_by_the_others():
    first, second = tune.SEEDS
    scores = {0.25: (0.5, 0.5), 0.5: (0.791, 0.810), 1.0: (0.8, 0.79), 2.0: (0.77, 0.9)}
    row, rounds = climbed(lambda rate, seed: scores[rate][tune.SEEDS.index(seed)])
    assert rounds[1] == [(0.5, second), (1.0, second)]  # not 2: it was too far behind, whatever it would have had
    assert rounds[2] == [(0.25, first)] and len(rounds) == 3  # what won by the mean is at the end
    assert row.rate == 0.5 and row.scores[0.5] == pytest.approx(0.8005)
    assert row.trials[2.0] == (0.77,)


def test_what_a_later_climb_finds_is_held_against_what_won_before():
    first, second = tune.SEEDS
    scores = {0.25: (0.83, 0.7), 0.125: (0.5, 0.5), 0.5: (0.795, 0.81), 1.0: (0.8, 0.79), 2.0: (0.5, 0.5)}
    row, rounds = climbed(lambda rate, seed: scores[rate][tune.SEEDS.index(seed)])
    assert rounds[1:] == [[(0.5, second), (1.0, second)], [(0.25, first)], [(0.125, first)], [(0.25, second)]]
    assert row.rate == 0.5  # .8025 against .765


def test_a_row_leaves_the_baselines_rate_only_for_a_better_one():
    """What counts as the same are half a point of accuracy, and 1% of others."""

    def rates_of(fp16, row, metric="accuracy"):
        def runs(scheme, scores):
            plans = [RunPlan("mlp", scheme, tune.SEEDS[0], rate=rate) for rate in (0.5, 1.0, 2.0)]
            return [
                replace(made_up(scheme, 1.0, [score] * 3), plan=plan, metric=metric, rising=metric == "accuracy")
                for plan, score in zip(plans, scores, strict=True)
            ]

        return [found.rate for found in tune.tuned([*runs("fp16", fp16), *runs("qsgd", row)])]

    assert rates_of((0.7, 0.8, 0.804), (0.7, 0.8, 0.804)) == [1.0, 1.0]
    assert rates_of((0.7, 0.8, 0.806), (0.7, 0.806, 0.802)) == [2.0, 2.0]  # the baseline's, not the task's own
    assert rates_of((0.7, 0.8, 0.7), (0.7, 0.8, 0.806)) == [1.0, 2.0]
    assert rates_of((0.7, 0.8, 0.7), (0.803, 0.7, 0.804)) == [1.0, 2.0]  # as far away on both sides
    assert rates_of((2.9, 2.5, 2.8), (2.48, 2.5, 2.8), "bits per byte") == [1.0, 1.0]
    assert rates_of((2.9, 2.5, 2.8), (2.47, 2.5, 2.8), "bits per byte") == [1.0, 0.5]


def test_where_all_diverge_lower_rates_are_tried():
    row, _ = climbed(lambda rate, seed: 0.8 if rate < 0.25 else math.nan)
    assert row.rate == 0.125 and row.trials[0.125] == (0.8,)
    row, rounds = climbed(lambda rate, seed: math.nan)
    assert row.rate == 0.125 and row.at_the_edge and len(rounds) == 3  # and it ends


def written_without_trials(record, folder):
    """The page of a record of before, which had none."""
    record.save(folder / "record.json")
    old = json.loads((folder / "record.json").read_text())
    del old["trials"]
    (folder / "old.json").write_text(json.dumps(old))
    write_report([Record.load(folder / "old.json")], folder / "old.html")
    return (folder / "old.html").read_text()


def test_every_row_is_compared_at_its_own_rate(monkeypatch, tmp_path):
    def fake(plan, links, on_point):
        best = 0.5 if plan.every > 1 else 2.0
        score = 0.9 - 0.1 * abs(math.log(plan.rate / best))
        return replace(made_up(plan.scheme, 1.0, [score] * 3, seed=plan.seed), plan=plan)

    monkeypatch.setattr(module, "execute", fake)
    console = Console(file=io.StringIO(), width=80)
    record = module.compare(["regression"], ["qsgd"], every=[1, 4], network="none", tune=True, console=console)
    assert {run.plan.name: run.plan.rate for run in record.runs} == {"fp16": 2.0, "qsgd": 2.0, "qsgd every 4": 0.5}
    assert record.config["tuned"] and "4x" in console.file.getvalue() and "2x" in console.file.getvalue()
    write_report([record], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    rates = re.sub(r"<[^>]+>", " ", page[page.index("<h2>Learning rates</h2>") : page.index("small notes")])
    assert "qsgd every 4 allreduce" in " ".join(rates.split()) and "<b>(90.0%)</b>" in page
    assert "Learning rates" not in written_without_trials(record, tmp_path)


def test_of_a_trial_only_the_end_is_looked_at():
    plan = RunPlan("regression(steps=20)", "fp32", 0, workers=2)
    whole, trial = execute(plan, None), execute(replace(plan, tested=False), None)
    assert len(whole.curve) == 20 and whole.final is not None and trial.final is None
    assert [point.step for point in trial.curve] == [18, 19, 20]
    assert [point.score for point in trial.curve] == [point.score for point in whole.curve[-3:]]
    assert tune.tuned([trial])[0].scores == tune.tuned([whole])[0].scores


def test_the_table_tells_who_had_one_seed():
    row = tune.Tuned(("mlp", "allreduce", "qsgd"), True, "accuracy", {0.5: (0.7,), 1.0: (0.8, 0.9), 2.0: (math.nan,)})
    console = Console(file=io.StringIO(), width=80)
    console.print(table.tuning_table([row]))
    assert console.file.getvalue().splitlines()[-1].split() == ["qsgd", "(70.0%)", "85.0%", "(diverged)", "1x"]
    row = replace(row, trials={0.5: (0.7,), 1.0: (0.9,), 2.0: (0.7,)})
    assert [table.trial_text(row, rate) for rate in (0.5, 1.0, 4.0)] == ["(70.0%)", "(90.0%)", ""]


def test_trials_that_were_made_are_shown_and_kept_when_the_next_is_interrupted(monkeypatch, tmp_path):
    def fake(plan, links, on_point):
        if plan.scheme == "qsgd":
            raise KeyboardInterrupt
        return replace(made_up(plan.scheme, 1.0, [0.8] * 3, seed=plan.seed), plan=plan)

    monkeypatch.setattr(module, "execute", fake)
    console = Console(file=io.StringIO(), width=80)
    file = tmp_path / "record.json"
    record = module.compare(["regression"], ["qsgd"], network="none", tune=True, json=file, console=console)
    assert record.interrupted and "80.0%" in console.file.getvalue() and "fp16" in console.file.getvalue()
    kept = Record.load(file)
    assert kept.interrupted and not kept.runs and len(kept.trials) == 3
    assert tune.tuned(kept.trials) == tune.tuned(record.trials)


def test_a_run_has_the_rate_it_was_given():
    """Twice the rate under half of the task's own is the task's own."""
    plan = RunPlan("regression(steps=4)", "fp32", 0, workers=2, tested=False)
    plain, double = execute(plan, None), execute(replace(plan, rate=2.0), None)
    assert plain.final is None and double.curve[-1].loss != plain.curve[-1].loss

    def after_one_step(factor):
        torch.manual_seed(0)
        task = load_task("regression")
        model = task.model()
        optimizer = task.optimizer(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] *= factor
        return optimizer.param_groups[0]["lr"]

    assert after_one_step(2.0) == 2 * after_one_step(1.0)


def test_the_tables_rates_are_of_tasks_that_are_there():
    for task, rows in rates.RATES.items():
        assert task in TASKS
        assert all(rate in tune.GRID for rate in rows.values())
    assert rates.of("mlp", "nothing") == 1.0 and not rates.known("mlp", "nothing")
