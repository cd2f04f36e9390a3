"""The reproduction's parts: its toy holds, its claims follow from what was measured, its tables are whole."""

import copy

import pytest
import torch
from torch import nn

from thinwire.lab.repro import regtopk as repro
from thinwire.lab.repro.claims import Findings, Stoppable, carried_out
from thinwire.lab.repro.regtopk import finetuning, images, regression, toy
from thinwire.lab.repro.regtopk.images import UNCOMPRESSED, ImageRun, Outcome, rows_at
from thinwire.lab.tasks import datasets
from thinwire.lab.tasks.resnets import resnet18


def test_the_toys_claims_hold():
    claims = []
    table = toy.toy_table(claims)
    assert [claim.holds for claim in claims] == [True, True, True]
    assert [row[0] for row in table.rows] == list(toy.TOY_STEPS)


@pytest.mark.parametrize(
    "name, ends, holds",
    [
        ("RegTop-k", [-14.1, -14.5], True),
        ("RegTop-k", [-13.9, -14.5], False),
        ("Top-k", [-2.9, -3.4], True),
        ("Top-k", [-2.9, -3.6], False),
    ],
)
def test_every_seed_counts_for_the_regressions_claims(name, ends, holds):
    assert regression._regression_claim(name, ends).holds is holds


def outcomes(**accuracies):
    """Runs at 0.1%, one accuracy a seed: bare and full Top-k and RegTop-k."""
    rows = dict(zip(("bare", "bare_reg", "topk", "regtopk"), rows_at(0.001), strict=False))
    return {(0.001, rows[name]): [Outcome(each) for each in found] for name, found in accuracies.items()}


def test_the_margins_on_images_are_reported_as_they_are():
    runs = outcomes(
        bare=[20.0, 21.0, 22.0], bare_reg=[20.0, 20.5, 23.0], topk=[30.0, 31.0, 32.0], regtopk=[31.0, 32.1, 32.9]
    )
    claims = images.claims_of("anywhere", 0.001, runs)
    assert [claim.verdict for claim in claims] == ["holds", "holds", "holds", "level"]
    assert [claim.source for claim in claims] == ["paper", "ours", "ours", "ours"]
    assert claims[0].measured.startswith("+1.0 ±0.2 points")
    alone = images.claims_of("anywhere", 0.001, {key: [each] for key, (each, *_) in runs.items()})
    assert [claim.verdict for claim in alone] == ["level"] * 4  # one seed tells nothing
    less = outcomes(
        bare=[29.0, 30.0, 31.0], bare_reg=[28.0, 29.1, 29.9], topk=[30.0, 31.0, 32.0], regtopk=[29.0, 30.1, 30.9]
    )
    assert [claim.verdict for claim in images.claims_of("anywhere", 0.001, less)] == [
        "fails",
        "holds",
        "fails",
        "fails",
    ]
    assert images.claims_of("anywhere", 0.0001, runs) == []


def test_where_regtopk_gains_nothing_the_share_it_can_act_on_is_told():
    shares = {"bare": (0.0, 0.3), "bare_reg": (), "topk": (0.0, 0.001), "regtopk": ()}
    runs = {
        key: [Outcome(each.accuracy, shares[name]) for each in found]
        for name, (key, found) in zip(
            shares, outcomes(bare=[20.0, 21.0], bare_reg=[20.0, 21.0], topk=[30.0, 31.0], regtopk=[29.0, 31.0]).items(),
            strict=True,
        )
    }  # fmt: skip
    both, *_, bare = images.claims_of("anywhere", 0.001, runs)
    assert both.verdict == "level" and both.why_not and both.why_not.startswith("0.05% of what Top-k sends")
    assert bare.reason and bare.reason.startswith("15.00% of what Top-k sends")


def test_the_tables_hold_every_scheme_and_setting(monkeypatch):
    tiny = regression.Regression.draw(0, workers=3, points=20, size=10)
    monkeypatch.setattr(regression.Regression, "draw", lambda seed: tiny)
    monkeypatch.setattr(regression, "ROUNDS", (1, 2, 3))
    monkeypatch.setattr(regression, "LONG", 4)
    monkeypatch.setattr(ImageRun, "outcome", lambda run, row, dataset, seed: Outcome(50.0 + seed, (0.0, 0.1)))
    monkeypatch.setattr(finetuning, "started", lambda dataset, seed: None)
    shares = (0.0, *[0.2] * 9, 0.1)
    monkeypatch.setattr(finetuning, "tuned", lambda start, local, row, run, seed: Outcome(50.0 + seed, shares))
    monkeypatch.setattr(datasets, "embedded_images", lambda: None)
    *_, (_, said) = carried_out(repro.parts(False, None), 2, lambda text: None)
    curve, mus, guard, _, pictures, tuned = said.tables
    assert {(row[0], row[1]) for row in curve.rows} == {
        (density, name) for density in (0.4, 0.5, 0.55, 0.6, 0.9) for name in regression._schemes(density)
    }
    assert [row[0] for row in mus.rows] == list(regression.MUS) and len(guard.rows) == 2
    assert len(pictures.rows) == 1 + 2 * 5 and pictures.rows[1][3] == "+0.0 ±0.0"
    assert len(tuned.rows) == 2 * len(finetuning.LOCAL) and tuned.rows[1][4:] == [
        "+0.0 ±0.0",
        "20.0%",
        "20.0%",
        "10.0%",
    ]
    assert [claim.verdict for claim in said.claims if "local steps" in claim.claim] == ["holds"] * 3
    assert all(len(row) == len(table.columns) for table in said.tables for row in table.rows)
    assert sum("both with feedback" in claim.claim for claim in said.claims) == 2


def test_what_is_there_when_somebody_stops_it_is_kept(monkeypatch):
    """The seeds that all rows have."""
    rows, made = [(0.0, UNCOMPRESSED), *((0.001, row) for row in rows_at(0.001))], []

    def outcome(run, row, dataset, seed):
        if len(made) == 2 * len(rows) + 3:
            raise KeyboardInterrupt
        made.append(row)
        return Outcome(50.0, (0.0,))

    monkeypatch.setattr(ImageRun, "outcome", outcome)
    stop = Stoppable()
    runs = images.train(ImageRun(rounds=1), rows, 5, None, lambda text: None, stop)
    assert stop.stopped and images.train(ImageRun(rounds=1), rows, 5, None, lambda text: None, stop) == {}
    assert list(runs) == rows and all(len(found) == 2 for found in runs.values())
    assert "2 seeds" in images.image_table("anywhere", runs).title


def test_the_net_is_resnet_18():
    """At its own width it has the weights that are published for CIFAR-10's: 11.17 million."""
    assert sum(p.numel() for p in resnet18(3, width=64).parameters()) == 11_173_962
    assert resnet18(1, width=2)(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).shape == (2, 10)


def few():
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (120, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.arange(120) % 2
    pictures[labels == 1, :, :4] //= 4
    examples = datasets.Examples(pictures, labels)
    return datasets.Dataset(examples, examples)


def test_images_learn_and_re_sent_shares_are_told_round_by_round():
    trained = ImageRun(rounds=25, workers=2, width=2).outcome(rows_at(0.05)[3], few(), 0)
    assert trained.accuracy > 75
    assert len(trained.resent) == 25 and trained.resent[0] == 0 and 0 < max(trained.resent) <= 1


# -- the authors' protocol ------------------------------------------------------------------------------------------


def four_labels():
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 64, (240, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.arange(240) % 4
    for label in range(4):
        pictures[labels == label, :, 2 * label : 2 * label + 2] *= 3
    examples = datasets.Examples(pictures, labels)
    return datasets.Dataset(examples, examples)


def test_what_is_tuned_has_learnt_other_labels_and_has_a_new_head():
    start = finetuning.started(four_labels(), 0, width=2, steps=30)
    assert start.dataset.train.targets.unique().tolist() == [0, 1] and len(start.dataset.test) == 120
    torch.manual_seed(0)
    fresh = resnet18(1, width=2, classes=2)
    assert not torch.equal(start.model[1][0].weight, fresh[1][0].weight)
    trunk = nn.Sequential(*start.model[:-1]).eval()
    known = finetuning._of_labels(four_labels(), 0, 2).train
    features = trunk(known.inputs).detach()
    first, second = (features[known.targets == label].mean(0) for label in (0, 1))
    assert (first - second).norm() > features[known.targets == 0].std(0).norm()  # the trunk tells its labels apart
    assert images._accuracy(start.model, known) < 95  # and the head knows nothing of it
    again = finetuning.started(four_labels(), 0, width=2, steps=30)
    assert all(map(torch.equal, start.model.state_dict().values(), again.model.state_dict().values()))


def test_local_steps_leave_no_trace_of_their_way_and_give_the_last_gradient():
    start = finetuning.started(four_labels(), 0, width=2, steps=1)
    before = {name: tensor.detach().clone() for name, tensor in start.model.named_parameters()}

    def parameters_of(model):
        return dict(model.named_parameters())

    examples = start.dataset.train[:20]
    model = copy.deepcopy(start.model)
    third = finetuning.after_local_steps(3, model, parameters_of(model), iter([examples] * 3))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    walker = copy.deepcopy(start.model)
    for _ in range(2):
        step = finetuning.after_local_steps(1, walker, parameters_of(walker), iter([examples]))
        with torch.no_grad():
            for name, tensor in walker.named_parameters():
                tensor.sub_(step[name], alpha=finetuning.RATE)
    last = finetuning.after_local_steps(1, walker, parameters_of(walker), iter([examples]))
    assert all(torch.equal(third[name], last[name]) for name in third)


def test_tuning_starts_from_what_was_learnt_every_time():
    start = finetuning.started(four_labels(), 0, width=2, steps=1)
    run, row = ImageRun(rounds=3, workers=2, rate=0.01), rows_at(0.05)[2]
    first, second = (finetuning.tuned(start, 2, row, run, 0) for _ in range(2))
    assert first == second and len(first.resent) == 3


def test_seeds_that_all_settings_have_are_kept(monkeypatch):
    made = []

    def tuned(start, local, row, run, seed):
        if len(made) == 8:
            raise KeyboardInterrupt
        made.append(seed)
        return Outcome(50.0, (0.0, *[0.1] * 9, 0.2))

    monkeypatch.setattr(finetuning, "started", lambda dataset, seed: None)
    monkeypatch.setattr(finetuning, "tuned", tuned)
    found = Findings(3, lambda text: None)
    finetuning.add_table("anywhere", None, found)
    assert found.stop.stopped and found.tables[0].title.endswith("1 seeds") and len(found.tables[0].rows) == 6
    assert [claim.verdict for claim in found.claims] == ["level"] * 3  # one seed tells nothing
    assert {claim.why_not for claim in found.claims} == {"in the first rounds, seed by seed: 10.0%"}
    finetuning.add_table("anywhere", None, found)
    assert found.tables[1].rows == []
