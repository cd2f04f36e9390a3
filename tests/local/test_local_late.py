"""LocalSteps over servers, where workers come late, or again: they join while the others train."""

import threading
import time
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import thinwire as tw
from helpers.late import Crew
from helpers.loops import steps
from helpers.models import batch
from helpers.plain import die
from helpers.training import assert_replicas_equal
from helpers.world import run_world
from thinwire.exchange.server import snapshots
from thinwire.exchange.server.frames import Kind
from thinwire.exchange.server.late.client import OpenParameterServer
from thinwire.local.late import Arrivals

PLAN = {"every": 4, "scheme": "topk(density=0.25)", "exempt": ()}
STREAMED = {"servers": 2, "parts": 2, "delay": 1, "mix": 0.5}


def network(seed, width):
    """Of every kind that a newcomer must be told: weights, frozen ones and statistics."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(20, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 7))
    net[0].bias.requires_grad_(False)
    return net


def everything(net):
    return [tensor.detach().clone() for tensor in [*net.parameters(), *net.buffers()] if tensor.is_floating_point()]


def loss_of(net):
    x, y = batch(99, 0)
    with torch.no_grad():
        loss = float(nn.functional.mse_loss(net.eval()(x), y))
    net.train()
    return loss


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]


def after(kind, server, nth, do):
    """In this process, do something once it has said a thing of this kind to this server for the so-manieth time; None:
    once it has heard of somebody by it, later than the first time.
    """
    plain, said = OpenParameterServer._saying, []

    def saying(self, *message, **more):
        heard = yield from plain(self, *message, **more)
        said.append(message[:2])
        times = said.count(message[:2]) if message[:2] == (kind, server) else 0
        if times == nth or (nth is None and times > 1 and heard[1].any()):
            do()
        return heard

    OpenParameterServer._saying = saying


def serve(servers=1, room=None):
    return tw.join(servers=servers, late=True, room=room, timeout_seconds=30).serve()["workers"], threads()


def train(whole, *, dies=None, waits=None, does=None, servers=1, room=None, width=24, **plan):
    """Train until `whole` workers are there, after one was lost or has come, and for two rounds more.

    dies: at this step. waits: for this file, where it hears that a worker is lost. does: something `after` a moment.
    """
    role = tw.join(servers=servers, late=True, room=room, timeout_seconds=30)
    if does is not None:
        after(*does)
    net = network(role.exchange.worker, width)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    rounds, back = {}, None  # by their numbers: how many workers, the loss, the weights
    with tw.LocalSteps(net, optimizer, exchange=role.exchange, **PLAN | plan) as local:
        begun, owed = local.step, [float(t.abs().max()) for (_, key), t in local.memory.items() if key == "residual"]
        changed = begun > 0
        while back is None or local.schedule.round < back + 2:
            if local.steps == dies:
                die()
            x, y = batch(role.exchange.worker, local.steps)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            if local.schedule.at != local.schedule.delay or local.step == begun:
                continue  # what it exchanged last is under way, or it has exchanged nothing
            workers = role.exchange.workers
            rounds[local.schedule.round] = (workers, loss_of(net), everything(net))
            changed = changed or workers < whole
            if changed and workers == whole and back is None:
                back = local.schedule.round
            while workers < whole and waits is not None and not waits.exists():
                time.sleep(0.01)
    return {
        "rounds": rounds,
        "back": back,
        "owed": max(owed, default=0.0),
        "void": local.void_rounds,
        "weights": everything(net),
        "threads": threads(),
    }


def assert_one_job(told, newcomer):
    """All ended together, with the same weights from the round on in which the newcomer took part."""
    assert all(isinstance(each, dict) for each in told), told
    back = newcomer["back"]
    assert {each["back"] for each in told} == {back} and newcomer["owed"] == 0
    assert all(each["threads"] == [] and each["void"] == 0 for each in told)
    assert_replicas_equal([each["weights"] for each in told])
    for each in told:
        last = max(each["rounds"])
        assert set(range(min(each["rounds"]), last + 1)) == set(each["rounds"])  # no round was lost
        assert each["rounds"][last][1] < 0.9 * told[0]["rounds"][min(told[0]["rounds"])][1]
    return back


@pytest.mark.parametrize("options", [{}, STREAMED], ids=["at once", "streamed, two servers"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_that_starts_again_joins_within_two_rounds(options, victim, tmp_path):
    servers = options.get("servers", 1)
    knocked = tmp_path / "knocked"
    with Crew(servers + 4) as crew:
        serving = [crew.start(rank, serve, servers) for rank in range(servers)]
        workers = {
            worker: crew.start(servers + worker, partial(
                train, 4, dies=6 if worker == victim else None, waits=knocked, **options
            )) for worker in range(4)
        }  # fmt: skip
        (killed,) = crew.end(workers.pop(victim))
        assert "SIGKILL" in killed
        again = crew.start(
            servers + victim, partial(train, 4, does=(Kind.KNOCK, 0, 1, knocked.touch), **options)
        )  # fmt: skip
        newcomer, *others = crew.end(again, *workers.values())
        back = assert_one_job([*others, newcomer], newcomer)
        assert crew.end(*serving) == [(4.0, [])] * servers
    for each in others:
        alone = [number for number, (workers, *_) in each["rounds"].items() if workers == 3]
        assert min(alone) < back <= min(alone) + 2
        if not options:
            for number in range(back, max(each["rounds"]) + 1):
                assert_replicas_equal([each["rounds"][number][2], newcomer["rounds"][number][2]])


def await_file(file):
    """Wait for a file that a worker makes by an `after`."""
    limit = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_one_more_may_come_where_there_is_room_and_none_whose_number_is_taken(tmp_path):
    file, there = tmp_path / "begun", tmp_path / "there"
    with Crew(3) as crew:
        serving = crew.start(0, partial(serve, room=3))
        begins = {1: (Kind.ROLL, 0, 1, file.touch)}  # the second worker calls no roll at the beginning
        workers = [crew.start(1 + worker, partial(train, 3, room=3, does=begins.get(worker))) for worker in range(2)]
        await_file(file)
        (refused,) = crew.end(crew.start(4, partial(train, 3, room=3)))
        assert "there is room for 3 workers, up to rank 3" in refused
        double = crew.start(1, partial(train, 3, room=3, does=(Kind.KNOCK, 0, 1, there.touch)))
        await_file(there)
        newcomer, *others = crew.end(crew.start(3, partial(train, 3, room=3)), *workers)
        assert_one_job([*others, newcomer], newcomer)
        assert crew.end(serving) == [(3.0, [])]
        (unwanted,) = crew.end(double)
        assert "the job has ended" in unwanted


def test_whoever_cannot_join_costs_the_others_nothing():
    """Of another scheme, of another shape, dead at the door, dead as it comes in; then one that is right."""
    with Crew(4) as crew:
        serving = crew.start(0, serve)
        workers = [crew.start(1 + worker, partial(train, 3, dies=6 if worker == 2 else None)) for worker in range(3)]
        crew.end(workers.pop())
        wrong = [
            crew.start(3, partial(train, 3, scheme="topk(density=0.5)")),
            crew.start(3, partial(train, 3, width=25)),
        ]
        scheme, shape = crew.end(*wrong)
        assert "the scheme differs from the job's: topk(density=0.5" in scheme and "there" in scheme
        assert "the model differs from the job's" in shape
        for kind in (Kind.KNOCK, Kind.TAKE):
            (dead,) = crew.end(crew.start(3, partial(train, 3, does=(kind, 0, 1, die))))
            assert "SIGKILL" in dead
        newcomer, *others = crew.end(crew.start(3, partial(train, 3)), *workers)
        assert_one_job([*others, newcomer], newcomer)
        assert crew.end(serving) == [(3.0, [])]


@pytest.mark.parametrize(
    "moment", [(Kind.ROLL, 0, None), (Kind.GIVE, 0, 2), (Kind.ADMIT, 1, 3)], ids=["heard", "told", "in"]
)
def test_where_the_one_dies_who_lets_another_in_the_next_does(moment, tmp_path):
    """When it has heard of the newcomer; has told the state; has let it in at one server and not yet at the other."""
    file = tmp_path / "begun"
    with Crew(5) as crew:
        serving = [crew.start(rank, serve, 2, 4) for rank in range(2)]
        does = {0: (*moment, die), 1: (Kind.ROLL, 0, 1, file.touch)}
        # At the beginning it lets in itself, and then those who begin with it.
        workers = [
            crew.start(2 + worker, partial(train, 3, servers=2, room=4, does=does.get(worker))) for worker in range(3)
        ]
        await_file(file)
        fourth = crew.start(5, partial(train, 3, servers=2, room=4))
        (dead,) = crew.end(workers.pop(0))
        assert "SIGKILL" in dead
        newcomer, *others = crew.end(fourth, *workers)
        assert_one_job([*others, newcomer], newcomer)
        assert crew.end(*serving) == [(3.0, [])] * 2


def _weighted():
    """Worker w makes w + 1 steps of w + 1 each, in two rounds; those of the second start from the first's anchor."""
    role = tw.join(servers=1, late=True, timeout_seconds=30)
    if role.serves:
        return role.serve()["workers"]
    worker = role.exchange.worker
    net = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    plan = {"every": 9, "scheme": "fp32", "outer": "average", "weighted": True, "exempt": ()}
    with tw.LocalSteps(net, optimizer, exchange=role.exchange, **plan) as local:
        anchors = [net.weight.detach().clone()]
        for _ in range(2):
            for _ in range(worker + 1):
                net.weight.grad = torch.full_like(net.weight, -1.0 - worker)
                optimizer.step()
            local.sync()
            anchors.append(net.weight.detach().clone())
    return [float((after - before).mean()) for before, after in pairwise(anchors)]


def test_over_servers_workers_may_count_by_the_steps_they_made():
    """The mean of (w + 1)(w + 1), weighted by w + 1."""
    with Crew(4) as crew:
        members = [crew.start(rank, _weighted) for rank in range(4)]
        served, *moved = crew.end(*members)
    assert served == 3.0
    for each in moved:
        assert each == pytest.approx([(1 + 8 + 27) / 6] * 2, rel=1e-6)


def _lent():
    """What one worker lends another adopts, in one process."""
    plan = {"every": 4, "parts": 2, "scheme": "powersgd(factor_rank=2)", "controller": "uniform(interval=1)"}
    nets = [network(seed, 24) for seed in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    here, late = (tw.LocalSteps(*each, **plan) for each in zip(nets, optimizers, strict=True))
    steps(nets[0], optimizers[0], 0, 7)
    told = snapshots.unpack(snapshots.pack(Arrivals(here, nets[0], None)._lend()))  # as it travels
    with torch.no_grad():
        Arrivals(late, nets[1], None)._adopt(told)
    assert (late.step, late.steps, late.level, late.schedule.round) == (3, 7, here.level, 1)
    assert (here.schedule.made, late.schedule.made, late.schedule.at) == ([1, 3], [0, 0], 3)
    for (name, key), tensor in late.memory.items():
        shared = key in here.scheme.shared_state
        assert torch.equal(tensor, here.memory[name, key] if shared else torch.zeros_like(tensor))
    anchor, theirs = here.anchor.state_dict()["anchor"], nets[0].state_dict()
    for name, tensor in nets[1].state_dict().items():
        assert torch.equal(tensor, anchor.get(name, theirs[name]))
    here.close(), late.close()


def test_all_that_workers_have_in_common_is_told_and_nothing_of_their_own():
    run_world(_lent, 1)


def _differ():
    role = tw.join(servers=1, late=True, timeout_seconds=30)
    if role.serves:
        return role.serve()
    net = network(0, 24)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return tw.LocalSteps(net, optimizer, every=4 + role.exchange.worker, exchange=role.exchange)


def test_those_who_begin_must_have_been_given_the_same():
    with Crew(3) as crew:
        server, *workers = crew.end(*[crew.start(rank, _differ) for rank in range(3)])
    for each in workers:
        assert "the plan of local steps differs between ranks: ranks [0] (every 4" in each
    assert "the job did not begin: its workers refused" in server


@pytest.mark.parametrize(("options", "message"), [
    ({"late": True, "on_failure": "stop"}, "goes on without the lost"), ({"room": 4}, r"join\(late=True\)"),
])  # fmt: skip
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tw.join(**options)
