"""advise: what is made of predictions, rehearsals against real steps, and the command."""

import copy
import json
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import thinwire as tw
from helpers.costs import ROOMY, a_link, a_talk
from helpers.world import run_world
from thinwire import cli
from thinwire.exchange.collectives import AllReduced
from thinwire.lab.cost import link as links
from thinwire.lab.cost import noise, rehearsal
from thinwire.lab.cost.advice_text import bits
from thinwire.lab.cost.advise import Advice, Given, default_schemes
from thinwire.lab.cost.advise_command import advise_on_networks, check_sentence, parameters
from thinwire.lab.cost.model import FLOATS, BucketTrace, Link, LinkCost, Message, Step, Turn, level_of
from thinwire.lab.cost.noise import Gradients
from thinwire.lab.cost.rehearsal import rehearse
from thinwire.lab.cost.replay import play
from thinwire.lab.cost.survey import Matrices, Survey
from thinwire.schemes import registry

# -- what is made of predictions --------------------------------------------------------------------------------------


def a_survey(schemes, meeting_seconds=1.0, **more):
    """Schemes by (encode seconds, bytes) on a model that computes for a second, over 1 kB/s."""
    steps = {name: [Step(1.0, (a_talk(1.0, (encode, sent), (0.0,)),))] for name, (encode, sent) in schemes.items()}
    return Survey(1000, 4, a_link(per_byte=1e-3), ROOMY, [Step(1.0, ())], meeting_seconds, steps, **more)


def advice(schemes, errors=(), gradients=None, given=Given()):  # noqa: B008, it cannot be changed
    return Advice(a_survey(schemes, errors=dict(errors), gradients=gradients), "a model", "a network", given)


SHORT = {"fp16": (0.0, 9000), "qsgd": (0.1, 1000), "terngrad": (0.1, 300), "topk": (0.1, 200)}
ERRORS = {"fp16": 1e-7, "qsgd": 0.06, "terngrad": 3.0, "topk": 0.9}


def test_what_is_merely_short_is_not_recommended():
    """terngrad is fastest by the step, and says less than nothing; what topk leaves out comes later."""
    blind = advice(SHORT, ERRORS)
    assert blind.best.scheme == "qsgd" and "by the step" in blind.recommendation
    assert "not recommended, for an error above 0.25" in blind.recommendation and "terngrad" in blind.recommendation
    seeing = advice(SHORT, ERRORS, Gradients(4, each=4.0, signal=1.0))
    assert seeing.best.scheme == "qsgd" and "to the same accuracy" in seeing.recommendation
    assert {row.scheme for row in seeing.rows if row.recommended} == {"fp16", "qsgd"}
    assert all(each != "terngrad" for each, _ in seeing.rounds.values())


def test_an_error_costs_steps_by_the_noise_rule():
    group = Gradients(4, each=4.0, signal=1.0)  # sigma^2 = 3
    assert group.steps(0.0) == pytest.approx(1 + 0.15 * 3 / 4)
    assert group.steps(0.5) == pytest.approx(1 + 0.15 * (3 + 0.5 * 4) / 4)
    assert group.steps(0.5, back=True) == pytest.approx(1 + 0.15 * ((3 + 0.5 * 4) / 4 + 0.5 * (1 + 3 / 4)))
    rows = {row.scheme: row for row in advice(SHORT, ERRORS, group).rows}
    assert rows["qsgd"].steps == pytest.approx(group.steps(0.06, back=True) / group.steps(1e-7))
    assert rows["qsgd"].speedup == pytest.approx(10 / 2.1 / rows["qsgd"].steps)
    assert all(row.steps == 1 for row in advice(SHORT, ERRORS).rows)


def test_a_row_never_contradicts_itself():
    """What is faster here pays here, whatever a link on paper would say; what is slower does not."""
    found = advice(SHORT, ERRORS)
    for row in found.rows:
        if row.scheme != "fp16":
            assert (row.speedup > 1) == (row.break_even is not None and row.break_even >= 8000)
    for speedup, said in ((1.32, 8000), (0.9, None)):
        slow = advice({"fp16": (0.0, 10), "qsgd": (5.0, 10)})  # at no bandwidth
        assert slow._break_even("qsgd", speedup) == said


def test_what_was_asked_for_and_not_found_is_explained():
    text = str(advice(SHORT, ERRORS, given=Given(1e6, 0.5)))
    assert "Asked for 1 Mbit/s, which 4 workers on this machine do not get" in text
    assert "Asked for 500 ms of computing; fp16's 1000 ms have in them" in text
    assert "Asked" not in str(advice(SHORT, ERRORS, given=Given(8000, 1.0)))


def test_the_tables_fit_80_columns():
    names = {"powersgd(factor_rank=4), two levels": (0.1, 123456)} | SHORT
    errors = ERRORS | {"powersgd(factor_rank=4), two levels": 0.123}
    text = str(advice(names, errors, Gradients(4, each=4.0, signal=1.0), Given(1e12, 0.5)))
    assert "…" not in text and max(len(line.rstrip()) for line in text.splitlines()) <= 80


def _norms():
    torch.manual_seed(dist.get_rank())
    shared = torch.randn(300_000, generator=torch.Generator().manual_seed(9))
    own = {"a": shared[:200_000].view(200, 1000) + torch.randn(200, 1000), "b": shared[200_000:]}
    found = noise.measure(own, dist.group.WORLD)
    return found, noise.sample(own)


def test_signal_and_noise_of_a_group_are_measured_by_sketches():
    (found, sampled), (other, _) = run_world(_norms, 2)
    assert found == other and found.workers == 2
    assert found.each == pytest.approx(500_000, rel=0.01) and found.signal == pytest.approx(300_000, rel=0.03)
    assert list(sampled) == ["a"]  # a vector travels exact


@pytest.mark.parametrize(
    ("spec", "least", "most"), [("fp16", 0, 1e-6), ("qsgd(bits=4)", 0.01, 0.1), ("terngrad", 1, 9)]
)
def test_the_error_of_a_message(spec, least, most):
    assert least <= noise.message_error(spec, {"w": torch.randn(256, 256)}) <= most
    assert noise.comes_back_compressed(spec, 4) == (spec != "fp16") and not noise.comes_back_compressed(spec, 2)


def test_the_recommendation_weighs_speed_first_and_error_where_speed_is_alike():
    many = {"fp16": (0.0, 9000), "qsgd": (0.1, 1000), "tnq": (0.2, 880), "natural": (1.5, 500)}
    slow_wire = advice(many, {"qsgd": 0.02, "tnq": 0.03, "natural": 0.01})
    assert slow_wire.best.scheme == "qsgd" and "Use qsgd: 2100 ms" in slow_wire.recommendation
    assert "4.8x as fast as fp16" in slow_wire.recommendation and "below" in slow_wire.recommendation
    nothing_pays = advice({"fp16": (0.0, 50), "qsgd": (0.1, 10)})
    assert nothing_pays.best.scheme == "fp16" and nothing_pays.recommendation.startswith("Use fp16: 1050 ms")
    barely = advice({"fp16": (0.0, 100), "tnq": (0.0, 10)})  # 9% faster is not worth an error
    assert barely.best.scheme == "fp16"


def test_break_even_of_a_row():
    rows = {row.scheme: row for row in advice({"fp16": (0.0, 9000), "qsgd": (0.1, 1000), "natural": (0.0, 9000)}).rows}
    assert rows["qsgd"].break_even == pytest.approx(8 * 8000 / 0.1, rel=1e-2)
    assert math.isnan(rows["fp16"].break_even) and rows["natural"].break_even is None
    assert rows["qsgd"].prediction.bound == "compute" and rows["fp16"].prediction.bound == "wire"


def test_how_often_to_exchange_and_from_which_link_on_every_step_is_enough():
    found = advice({"fp16": (0.0, 9000), "qsgd": (0.1, 1000)})  # 1 s of computing, 1 kB/s
    assert found.rounds[8][0] == "qsgd" and found.rounds[8][1].seconds == pytest.approx(1 + 1.1 / 8)
    assert found.seldom == 16 and "every 16 steps by qsgd" in found.how_often
    assert found.every_step_from == pytest.approx(8 * 9000 / 0.1, rel=1e-2)  # by fp16
    assert advice({"fp16": (0.2, 9000), "qsgd": (0.2, 1000)}).every_step_from == math.inf
    fast = advice({"fp16": (0.0, 9000), "qsgd": (0.05, 1000)})
    assert fast.every_step_from == pytest.approx(8 * 1000 / 0.05, rel=1e-2)
    assert "from 160 kbit/s on, every step is enough" in fast.how_often
    wide = advice({"fp16": (0.0, 50)})
    assert wide.seldom == 1 and wide.how_often.startswith("How often: in every step; on any link")
    assert [row["every"] for row in wide.as_json()["rounds"]] == [1, 2, 4, 8, 16, 32, 64]


def test_what_meeting_costs_is_added_to_all_alike():
    alike, straggling = (a_survey({"fp16": (0.0, 1000)}, meeting_seconds=seconds) for seconds in (1.0, 1.25))
    assert straggling.predict("fp16").seconds - alike.predict("fp16").seconds == pytest.approx(0.25)
    apart = [each.predict("fp16", every=5).seconds for each in (alike, straggling)]
    assert apart[1] - apart[0] == pytest.approx(0.05)  # only where they meet
    assert a_survey({"fp16": (0.0, 1000)}, meeting_seconds=0.5).straggling_seconds == 0


def test_advice_prints_and_is_json():
    found = advice({"fp16": (0.0, 9000), "qsgd": (0.1, 1000)})
    shown = str(found)
    assert "4 workers" in shown and "640 kbit/s" in shown and found.recommendation[:40] in shown
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["best"] == "qsgd" and [row["scheme"] for row in told["rows"]] == ["qsgd", "fp16"]
    assert told["rows"][1]["break_even_bits_per_second"] is None


@pytest.mark.parametrize("value, text", [(None, "never"), (math.inf, "always"), (3e6, "3 Mbit/s"), (5e4, "50 kbit/s")])
def test_bandwidths_in_words(value, text):
    assert bits(value) == text


class SlowCard:
    """Is given work and does it later; the clock is the host's."""

    def __init__(self):
        self.now, self.given = 0.0, 0.0

    def work(self, seconds):
        self.given += seconds
        self.now += 0.001  # a launch

    def synchronize(self, device):
        assert device == torch.device("cuda:1")
        self.now, self.given = self.now + self.given, 0.0


def test_seconds_on_a_device_are_its_own_and_not_those_of_launches(monkeypatch):
    card = SlowCard()
    monkeypatch.setattr(torch.cuda, "synchronize", card.synchronize)
    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: card.now)
    lane = rehearsal.RehearsalLane(rehearsal.Rehearsed(), lambda: None, torch.device("cuda:1"))
    lane.timer = lambda: card.now

    def talk(scratch):
        card.work(3.0)
        yield [AllReduced(torch.zeros(4), rehearsal._PretendedGroup(2))]
        card.work(5.0)
        return torch.zeros(1)

    began = lane.clock()
    card.work(7.0)  # backward
    lane.submit(talk, last=True, done=lambda error: None)
    card.work(2.0)
    assert lane.clock() - began == pytest.approx(9.002), "what training computed, and nothing of the exchange"
    (bucket,) = lane.buckets
    assert bucket.ready - began == pytest.approx(7.001)
    assert [turn.encode_seconds for turn in bucket.turns] == pytest.approx([3.001, 5.001])


def test_a_link_is_measured_where_the_buckets_are():
    device, group = torch.device("meta"), rehearsal._PretendedGroup(3)
    made = [links._all_reduced(group, device, torch.float16, 4096), links._all_gathered(group, device, 4096)]
    made.append(links._all_to_all(group, device, 4096))
    assert all(each.tensor.device == device for each in made)
    assert all(each.out.device == device for each in made[1:])
    assert all(each.amounts()["bytes_sent"] == pytest.approx(4096, rel=0.01) for each in made)


# -- real groups ------------------------------------------------------------------------------------------------------


def _rehearsed_and_real(schemes):
    torch.manual_seed(0)
    model = DistributedDataParallel(Matrices(5000))

    def train():
        model.zero_grad()
        model(torch.ones(())).backward()

    found = {}
    for scheme in schemes:
        (step,) = rehearse(model, train, scheme, workers=dist.get_world_size(), steps=1)
        with tw.attach(model, scheme) as wire:
            train()
            stats = wire.stats()
        found[scheme] = (step.bytes_sent, len(step.messages), stats["bytes_sent"], stats["messages"])
    return found


def test_a_rehearsal_counts_what_really_is_sent_for_every_scheme():
    schemes = default_schemes()
    assert len(schemes) == len(registry())
    for scheme, (nbytes, messages, sent, real_messages) in run_world(_rehearsed_and_real, 3, schemes)[0].items():
        assert (nbytes, messages) == (sent, real_messages), scheme


def _levels_rehearsed_and_real(schemes):
    torch.manual_seed(0)
    model = DistributedDataParallel(Matrices(3_000_000))

    def train():
        model.zero_grad()
        model(torch.ones(())).backward()

    found = {}
    for scheme in schemes:
        (step,) = rehearse(model, train, scheme, workers=4, steps=1, local=2)
        with tw.attach(model, scheme, exchange=tw.Hierarchical.of_nodes(2)) as wire:
            train()
            stats = wire.stats()
        sent = {level: sum(m.bytes_sent for m in step.messages if level_of(m.kind) == level) for level in LEVELS}
        found[scheme] = (*sent.values(), stats["bytes_sent_inside"], stats["bytes_sent_outside"])
    return found


LEVELS = ("inside", "between")


def test_a_rehearsal_on_two_levels_counts_what_really_is_sent_on_each():
    schemes = ["fp16", "qsgd(bits=4)", "powersgd(factor_rank=4)"]
    for scheme, (inside, between, *sent) in run_world(_levels_rehearsed_and_real, 4, schemes)[0].items():
        assert [inside, between] == sent and min(sent) > 0, scheme


def test_on_two_levels_each_has_a_wire_of_its_own():
    kinds = {
        FLOATS: LinkCost(0.0, 1.0),
        f"inside {FLOATS}": LinkCost(0.0, 0.5),
        f"between {FLOATS}": LinkCost(0.0, 2.0),
    }
    link = Link(4, kinds, local=2)
    turns = (Turn(0.0, (Message(f"inside {FLOATS}", 8.0), Message("between AllGathered", 3.0))), Turn(0.0))
    played = play(Step(0.0, (BucketTrace(0.0, turns),)), link, ROOMY)
    assert played.seconds == pytest.approx(max(8 * 0.5, 3 * 2.0))
    slower = link.at(8.0, ROOMY)  # a byte a second: two workers share that, and nothing of it is inside
    assert [slower.cost(kind).seconds_per_byte for kind in kinds] == [1.0, 0.0, 2.0]


def _live():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 8))
    model = DistributedDataParallel(net)
    wire = tw.attach(model, "qsgd(bits=4)")
    inputs = torch.randn(16, 64)
    model(inputs).square().mean().backward()
    before = copy.deepcopy(net.state_dict())
    gradients = [p.grad.clone() for p in net.parameters()]
    random = torch.get_rng_state()

    found = tw.advise(model, inputs, schemes=["topk(density=0.1)"])

    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, net.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state()) and wire.step == 1
    model(inputs).square().mean().backward()
    assert wire.step == 2  # the user's own wire is at work again
    wire.close()
    with pytest.raises(ValueError, match="needs loss="):
        tw.advise(DistributedDataParallel(_Odd()), inputs)
    with pytest.raises(ValueError, match="got Linear"):
        tw.advise(nn.Linear(2, 2), inputs)
    return found.as_json()


class _Odd(nn.Linear):
    def __init__(self):
        super().__init__(64, 2)

    def forward(self, inputs):
        return {"answer": super().forward(inputs)}


def test_advice_on_a_live_model_is_the_same_on_all_ranks_and_leaves_no_trace():
    first, second = run_world(_live, 2)
    assert first["rows"] == second["rows"] and first["recommendation"] == second["recommendation"]
    assert {row["scheme"] for row in first["rows"]} == {"fp16", "topk(density=0.1)"}
    assert first["host"]["workers"] == 2 and first["link"]["kinds"][FLOATS]["seconds_per_byte"] > 0


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_on_a_model_by_its_size(tmp_path):
    file = tmp_path / "advice.json"
    arguments = f"advise --params 20k --compute 5ms --workers 2 --network none --scheme terngrad --json {file}"
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    (told,) = json.loads(file.read_text())
    assert told["parameters"] == 20_000 and {row["scheme"] for row in told["rows"]} == {"fp16", "terngrad"}
    assert all(row["compute_seconds"] > 0.00499 for row in told["rows"])
    assert "Use " in result.output and "terngrad" in result.output


def test_the_check_has_predicted_beside_measured(capsys):
    (found,) = advise_on_networks(task="regression", schemes=["qsgd(bits=4)"], networks=["none"], workers=2, check=True)
    assert set(found.survey.performed) == {"fp16", "qsgd(bits=4)"} and min(found.survey.performed.values()) > 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "predicted / measured" in shown and check_sentence([found]) in shown


def test_machines_of_several_workers_are_advised_on_two_levels(capsys):
    (found,) = advise_on_networks(
        params="20k", compute_seconds=0.005, schemes=["qsgd(bits=4)"], networks=["none"], workers="2x2"
    )
    assert set(found.survey.steps) == {"fp16", "fp16, two levels", "qsgd(bits=4), two levels"}
    assert "2 workers share a machine's link" in " ".join(capsys.readouterr().out.split())


def test_under_torchrun_the_group_is_the_one_that_there_is():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "thinwire.cli"]
    done = subprocess.run(
        [*launch, "advise", "--params", "20k", "--scheme", "fp16"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Use fp16") == 1 and "2 workers" in done.stdout


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--params many", "number of weights 'many'"),
        ("--params 0", "number of weights '0'"),
        ("--params 1M --task mlp", "name one model"),
        ("--params 1M --compute fast", "cannot read the time 'fast'"),
        ("--task chess", "unknown task 'chess'"),
        ("--task mlp --compute 5ms", "--compute belongs to --params"),
        ("--scheme zip", "unknown scheme 'zip'"),
        ("--network shaped:fast", "cannot read the rate 'fast'"),
        ("--workers 1", "workers must be at least 2, got 1"),
        ("--params 1M --check", "--check trains"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thinwire", "advise", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert ended.value.code == 2 and said in told.err and told.err.count("\n") == 1 and told.out == ""


@pytest.mark.parametrize("text, number", [("25M", 25_000_000), ("1.5k", 1500), ("7", 7), ("0.1B", 10**8)])
def test_numbers_of_weights(text, number):
    assert parameters(text) == number
    assert sum(p.numel() for p in Matrices(parameters("1.5k")).parameters()) == 1500
