"""Workers and servers that die, hang or talk nonsense, launched plainly: nobody kills the survivors."""

import inspect
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import batch, digest, mlp
from helpers.plain import die, run_plain
from thinwire import server
from thinwire.exchange.server import client, operations

QSGD = "qsgd(bits=4, block=64)"


def no_broadcasts() -> dict[str, bool]:
    """A dead worker takes part in no collective, so DDP must not broadcast buffers. Renamed in PyTorch 2.13."""
    new = "forward_sync_buffers" in inspect.signature(DDP).parameters
    return {"forward_sync_buffers" if new else "broadcast_buffers": False}


def step(model, optimizer, worker, number):
    x, y = batch(worker, number % 4)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def _train(servers, spec, steps, events, timeout=20.0, on_failure="continue"):
    """Losses, numbers of workers and weights. `events`: {(worker, step): the signal it gets in mid-backward}."""
    role = tw.join(servers=servers, timeout_seconds=timeout, on_failure=on_failure)
    if role.serves:
        if ("server", dist.get_rank()) in events:
            operations.PlainSum.answer = lambda *_: die()
        return role.serve()
    model = DDP(mlp(), process_group=role.workers, **no_broadcasts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, workers = [], []
    with tw.attach(model, spec, exchange=role.exchange) as wire:
        for number in range(steps):
            if (event := events.get((role.exchange.worker, number))) is not None:
                model.module[0].weight.register_hook(lambda _, event=event: os.kill(os.getpid(), event))
            losses.append(step(model, optimizer, role.exchange.worker, number))
            workers.append(wire.stats()["workers"])
    return losses, workers, digest(model)


@pytest.mark.parametrize(("spec", "servers"), [(QSGD, 1), ("fp32", 2)])
def test_a_killed_worker_is_dropped_and_the_others_go_on(spec, servers):
    ends = run_plain(_train, servers + 4, servers, spec, 30, {(3, 5): signal.SIGKILL})
    assert ends[-1].code == -signal.SIGKILL
    assert all(end.code == 0 for end in ends[:-1]), ends
    assert all(end.value["workers"] == 3 for end in ends[:servers])
    first = ends[servers].value[2]
    for end in ends[servers:-1]:
        losses, workers, weights = end.value
        assert (workers[4], workers[-1]) == (4, 3)
        assert sum(losses[-4:]) < sum(losses[5:9])  # still learning
        assert all(torch.equal(a, b) for a, b in zip(weights, first, strict=True))


def test_where_a_lost_worker_stops_the_job_everybody_is_told():
    ends = run_plain(_train, 4, 1, QSGD, 1000, {(2, 5): signal.SIGKILL}, 20.0, "stop")
    assert ends[3].code == -signal.SIGKILL
    assert [end.code for end in ends[:3]] == [1, 1, 1]
    assert "worker 2: worker 2 is gone" in ends[0].error
    for end in ends[1:3]:
        assert "worker 2 is lost, and the job stops" in end.error or "server 0 is gone" in end.error


def test_a_worker_that_hangs_is_dropped_after_the_timeout():
    ends = run_plain(_train, 4, 1, "fp16", 6, {(1, 3): signal.SIGSTOP}, 2.0, stuck=(2,))
    for end in (ends[1], ends[3]):
        assert end.code == 0, end.error
        assert end.value[1][-1] == 2
    assert ends[0].code == 0 and ends[0].value["workers"] == 2


def test_a_killed_server_ends_the_job_everywhere():
    ends = run_plain(_train, 5, 2, "fp32", 1000, {("server", 0): True})
    assert ends[0].code == -signal.SIGKILL
    for end in ends[2:]:
        assert end.code == 1
        assert "could not be exchanged: server 0 is gone" in end.error
    assert ends[1].code == 1  # the other server ends with its workers, none of which had finished
    assert "workers were lost before they had finished" in ends[1].error


def _join_with_a_death(where, victim):
    """The victim dies where the others wait for it to connect."""
    if dist.get_rank() == victim:
        setattr(dist if where == "the workers' group" else server, MOMENTS[where], lambda *_, **__: die())
    tw.join(servers=1, timeout_seconds=2)


MOMENTS = {"the workers' group": "new_group", "a channel": "Channel"}


@pytest.mark.parametrize(("where", "victim"), [("the workers' group", 2), ("a channel", 0)])
def test_a_rank_that_dies_while_joining_is_an_error_for_the_others_after_the_timeout(where, victim):
    """Neither after PyTorch's half an hour nor after a worker's patience with its servers."""
    ends = run_plain(_join_with_a_death, 3, where, victim, limit=25)
    assert ends[victim].code == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        assert ends[rank].code == 1, ends[rank].error
        assert "time" in ends[rank].error or "is gone" in ends[rank].error


def _corrupt(servers, how):
    """Worker 1 sends something it should not; what each worker met."""
    role = tw.join(servers=servers, timeout_seconds=20)
    if role.serves:
        return role.serve()["workers"]
    send = client.Sent

    def corrupted(channel, tensor):
        payload = tensor.numel() > 256
        if (how == "payload") == payload:
            tensor = tensor.clone()
            tensor[17 if payload else 0] ^= 4
        return send(channel, tensor)

    model = DDP(mlp(), process_group=role.workers, **no_broadcasts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.attach(model, QSGD, exchange=role.exchange) as wire:
        for number in range(6):
            if number == 3 and role.exchange.worker == 1:
                client.Sent = corrupted
            step(model, optimizer, role.exchange.worker, number)
        return wire.stats()["workers"]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_corrupt_payload_is_that_workers_own_error(servers):
    *served, zero, one, two = run_plain(_corrupt, servers + 3, servers, "payload")
    assert one.code == 1
    assert "refused this worker's push: the payload was damaged" in one.error
    assert (zero.value, two.value) == (2.0, 2.0)
    assert all(end.code == 0 for end in served)


def test_a_corrupt_header_costs_that_worker_its_connection():
    served, zero, one, two = run_plain(_corrupt, 4, 1, "header")
    assert one.code == 1 and "server 0 is gone" in one.error
    assert (zero.value, two.value) == (2.0, 2.0)
    assert served.code == 0
