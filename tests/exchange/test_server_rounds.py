"""One server and its workers, thread by thread: who hears what when a round goes wrong, and what is remembered."""

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from helpers.gradients import gradient
from helpers.served import Served
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.feedback import wrap
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.core.request import Max, Mean, Sum
from thinwire.core.warmup import warm_up
from thinwire.exchange.exchange import drive
from thinwire.exchange.server import operations
from thinwire.exchange.server.channel import Channel
from thinwire.exchange.server.loop import Server
from thinwire.exchange.server.pushpull import PushPull
from thinwire.exchange.server.weights import SharedWeights
from thinwire.schemes import parse


def ones(size=4):
    return Sum(torch.ones(size))


def said(future):
    """Why a worker got no answer."""
    with pytest.raises(RuntimeError) as caught:
        future.result(20)
    return str(caught.value)


def lost(served):
    with pytest.raises(RuntimeError, match="workers were lost before they had finished") as caught:
        served.ended.result(20)
    return str(caught.value)


def test_what_goes_wrong_in_a_round_is_told_to_those_who_asked(monkeypatch):
    served = Served(2)

    def broken(*_):
        raise FileNotFoundError("no such thing on this machine")

    monkeypatch.setattr(operations.PlainSum, "answer", broken)
    for asked in [served.ask(worker, ones()) for worker in (0, 1)]:
        assert "the server could not answer: no such thing on this machine" in said(asked)
    assert "no such thing" in lost(served)


def bad(worker):
    """A mean whose payload names entries that are not there."""
    layout = Layout.of([("a", (2000,))])
    codec = tw.scheme("topk(density=0.01)")

    def encode(bucket, level, out):
        codec.encode(bucket, level, out)
        if worker == 1:
            out.fill_(255)

    bucket = Bucket(gradient(2000, seed=worker), layout, workers=3, worker=worker)
    return Mean(codec, bucket, codec.level, encode=encode)


def test_a_bad_payload_is_its_own_workers_error():
    served = Served(3, down="fp32")
    zero, one, two = (served.ask(worker, bad(worker)) for worker in range(3))
    assert "refused" in said(one)
    expected = (gradient(2000, seed=0) + gradient(2000, seed=2)) / 2
    kept = zero.result(20).nonzero().flatten()
    assert torch.equal(zero.result(20), two.result(20)) and kept.numel() > 20
    assert (zero.result(20) - expected).norm() < expected.norm()
    assert served.clients[0].workers == 2
    served.leave(0, 2)
    assert served.ended.result(20)["workers"] == 2.0


def test_where_a_bad_payload_stops_the_job_nobody_gets_an_answer():
    served = Served(3, stops=True)
    zero, one, two = (served.ask(worker, bad(worker)) for worker in range(3))
    assert "the job stops" not in said(one)
    for other in (zero, two):
        assert "worker 1 is lost, and the job stops" in said(other)
    assert all(client.workers == 3 for client in served.clients)
    lost(served)


def test_two_workers_that_disagree_both_hear_what_both_asked():
    served = Served(2)
    heard = [said(each) for each in [served.ask(0, ones(4)), served.ask(1, ones(8))]]
    numbers = [f"{operations.PlainSum('sum', 'float32', size).number:x}" for size in (4, 8)]
    for told in heard:
        assert "the workers ask different things" in told
        assert all(number in told for number in numbers)
    lost(served)


def test_a_majority_goes_on_without_the_odd_one():
    served = Served(3)
    zero, one, two = served.ask(0, ones(4)), served.ask(1, ones(8)), served.ask(2, ones(4))
    assert "where the others asked" in said(one)
    assert zero.result(20).tolist() == two.result(20).tolist() == [3.0] * 4
    served.leave(0, 2)
    assert served.ended.result(20)["workers"] == 2.0


def test_a_late_worker_hears_why_it_was_dropped():
    served = Served(2, timeout=0.4)
    assert served.ask(0, ones()).result(20).tolist() == [2.0] * 4  # scaled to the number that was counted on
    assert "it kept the others waiting for more than 0.4 seconds" in said(served.ask(1, ones()))
    assert served.ask(0, ones()).result(20).tolist() == [1.0] * 4
    served.leave(0)
    assert served.ended.result(20)["workers"] == 1.0


def test_a_worker_that_leaves_by_an_exception_has_not_finished():
    served = Served(3, stops=True)

    def leave_by(error):
        with contextlib.suppress(type(error)):
            try:
                raise error
            finally:
                served.clients[1].close()

    served.clients[2].close()
    asked = served.ask(0, ones())
    served.on_thread(leave_by, FileNotFoundError("no data")).result(20)
    assert "worker 1 is lost, and the job stops" in said(asked)
    told = lost(served)
    assert "worker 1: worker 1 is gone" in told and "worker 2" not in told


def test_one_that_exits_with_code_0_has():
    served = Served(1)
    with contextlib.suppress(SystemExit):
        try:
            sys.exit(0)
        finally:
            served.clients[0].close()
    assert served.ended.result(20)["workers"] == 1.0


SCRIPT = """
import sys, torch.distributed as dist
from thinwire.exchange.server.channel import Channel
from thinwire.exchange.server.client import ParameterServer

store, worker = dist.FileStore(sys.argv[1], 4), int(sys.argv[2])
exchange = ParameterServer([Channel(store, str(worker), "server 0", serves=False, timeout=30)], range(2), worker)
if worker:
    raise FileNotFoundError("no data")
"""


def test_a_process_that_dies_of_an_uncaught_exception_is_lost_and_one_that_ends_without_close_is_not(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 4)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    processes = [subprocess.Popen([*command, str(w)], stderr=subprocess.PIPE, text=True) for w in range(2)]
    channels = {w: Channel(store, str(w), f"worker {w}", serves=True, timeout=60) for w in range(2)}
    with pytest.raises(RuntimeError) as caught:
        Server(channels, stops=True, timeout=30, memory_bytes=1 << 26).run()
    assert "worker 1: worker 1 is gone" in str(caught.value) and "worker 0" not in str(caught.value)
    assert "no data" in processes[1].communicate(timeout=20)[1]
    assert (processes[0].wait(20), processes[1].wait(20)) == (0, 1)
    processes[0].communicate()


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(40, 40)


def push_pull(served, worker):
    return PushPull(served.clients[worker], list(net().named_parameters()), parse("fp32"), "float32", 0)


def sgd(weights):
    return torch.optim.SGD(weights, lr=1.0)


def test_where_the_first_worker_dies_before_it_gave_weights_the_others_hear_at_once():
    served = Served(3, timeout=60, shared=SharedWeights(sgd, 0))
    waiting = [served.on_thread(push_pull(served, worker).pull) for worker in (1, 2)]
    served.channels[0].cut()
    for each in waiting:
        assert "worker 0 was lost before it had given the first weights" in said(each)
    lost(served)


def test_an_optimizer_that_fails_is_told_to_all():
    class Failing(torch.optim.SGD):
        def step(self):
            raise ArithmeticError("no step")

    served = Served(2, shared=SharedWeights(lambda weights: Failing(weights, lr=1.0), 0))
    both = [push_pull(served, worker) for worker in (0, 1)]
    pulled = served.on_thread(both[1].pull)
    both[0].pull(first=True)
    pulled.result(20)
    for each in [served.on_thread(one.trade) for one in both]:
        assert "no step" in said(each)
    lost(served)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_the_servers_learning_rate_follows_their_schedule_and_is_saved():
    served = Served(1, shared=SharedWeights(sgd, 0, halving))
    one = push_pull(served, 0)
    one.pull(first=True)
    before = [parameter.detach().clone() for parameter in one._by_name.values()]
    for step in range(3):
        for parameter in one._by_name.values():
            parameter.grad = torch.ones_like(parameter)
        one.trade()
        if step == 1:
            state = served.clients[0].state_dict()
    assert state["server0000"]["shared"]["schedule"]["last_epoch"] == 2
    for parameter, begun in zip(one._by_name.values(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), begun - 1 - 0.5 - 0.25)
    served.clients[0].load_state_dict(state)
    one.trade()
    for parameter, begun in zip(one._by_name.values(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), begun - 1 - 0.5 - 0.25)
    served.leave(0)
    served.ended.result(20)


def test_what_a_server_optimizer_is_not():
    served = Served(1, shared=SharedWeights(sgd, 0))
    role = tw.Role(None, served.clients[0], {}, "stop", 10.0, 0)
    with pytest.raises(ValueError, match=r"so 'weight' cannot be torch\.float64"):
        tw.ServerOptimizer(net().double(), "fp32", role=role)
    optimizer = tw.ServerOptimizer(net(), "fp32", role=role)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(TypeError, match=r"role\.serve\(optimizer=, schedule=\)"):
        scaler.unscale_(optimizer)
    optimizer.close()
    served.ended.result(20)


def test_a_snapshot_is_not_kept_once_it_was_fetched():
    served = Served(1, shared=SharedWeights(lambda weights: torch.optim.Adam(weights), 0))
    one = push_pull(served, 0)
    one.pull(first=True)
    for parameter in one._by_name.values():
        parameter.grad = torch.ones_like(parameter)
    one.trade()
    state = served.clients[0].state_dict()
    assert served.server._snapshot is None
    moments = state["server0000"]["shared"]["optimizer"]["state"][0]
    assert moments["step"] == 1 and torch.allclose(moments["exp_avg"], torch.full((1640,), 0.1))
    served.clients[0].load_state_dict(state)
    served.leave(0)
    served.ended.result(20)


def conversation(served, worker, scheme, memory, x, step):
    client = served.clients[worker]
    layout = Layout.of([("w", tuple(x.shape))])
    scratch = Scratch()
    bucket = Bucket(x.reshape(-1).clone(), layout, client.workers, worker, step, 0, None, scratch, seat=client.place)
    return client._drive(drive(scheme.converse(bucket, memory, scheme.level), client, scratch))


@pytest.mark.parametrize("down", ["same", "bf16"])
@pytest.mark.parametrize(
    "spec", ["randomk(density=0.1, values='tnq(bits=2)')", "topkc(density=0.1, values='tnq(bits=2)')"]
)
def test_no_debt_is_paid_to_entries_that_never_owed_it(spec, down):
    """A gradient once, then none: what comes back from then on is nothing, whichever entries are chosen."""
    served, scheme = Served(2, down=down), parse(spec)
    for step in range(4):
        x = [gradient(64, 64, seed=worker) * (step == 0) for worker in (0, 1)]
        asked = [served.on_thread(conversation, served, worker, scheme, Memory(), x[worker], step) for worker in (0, 1)]
        means = [each.result(20) for each in asked]
        assert torch.equal(*means)
        assert bool(means[0].any()) is (step == 0)
    served.leave(0, 1)
    served.ended.result(20)


@pytest.mark.parametrize("spec", ["randomk(density=0.1, values='tnq')", "topkc(density=0.1, values='qsgd')"])
def test_a_density_that_changes_is_nothing_to_a_server(spec):
    served, scheme = Served(2, down="bf16"), warm_up(parse(spec), 2, 0.3)
    for step in range(4):
        asked = [
            served.on_thread(conversation, served, w, scheme, Memory(), gradient(64, 64, seed=w), step) for w in (0, 1)
        ]
        assert torch.equal(*(each.result(20) for each in asked))
    served.leave(0, 1)
    served.ended.result(20)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_thc_is_as_good_as_ever_once_a_worker_was_lost(dead):
    """Errors within the bound of one step, entry by entry, where worker numbers and places are no longer the same."""
    served, scheme, n = Served(3), wrap(parse("thc(bits=4)"), False), 4096
    for step in range(6):
        alive = [worker for worker in range(3) if step < 2 or worker != dead]
        if step == 2:
            served.channels[dead].cut()
        x = {worker: gradient(n, seed=10 * step + worker) for worker in alive}
        asked = {w: served.on_thread(conversation, served, w, scheme, Memory(), x[w], step) for w in alive}
        means = [each.result(20) for each in asked.values()]
        assert all(torch.equal(means[0], other) for other in means)
        if step != 2:  # in which the dead one is counted as zero
            exact = sum(x.values()) / len(alive)
            assert (means[0] - exact).norm() < 0.25 * exact.norm()
            assert abs(float(means[0][0] - exact[0])) < 5 * float((means[0] - exact).std())
    survivors = [worker for worker in range(3) if worker != dead]
    served.channels[survivors[0]].cut()
    last = survivors[1]
    for step in range(6, 9):
        x = gradient(n, seed=step)
        mean = served.on_thread(conversation, served, last, scheme, Memory(), x, step).result(20)
        if step > 6:
            assert (mean - x).norm() < 0.25 * x.norm()
    served.leave(last)
    served.ended.result(20)


def test_maxima_need_no_scaling():
    served = Served(2)
    asked = [served.ask(worker, Max(torch.tensor([float(worker), -1.0]))) for worker in (0, 1)]
    assert [each.result(20).tolist() for each in asked] == [[1.0, -1.0]] * 2
    served.leave(0, 1)
    served.ended.result(20)
