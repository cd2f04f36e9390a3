"""Collectives as they are started on gloo: the same answers as PyTorch's own, and the same end when one stays away."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

from helpers.world import run_world
from thinwire.exchange.collectives import AllToAll

WORKERS = 3
SIZES = [[5, 0, 300_000], [7, 4096, 0], [0, 0, 1]]  # SIZES[i][j]: bytes from worker i to worker j


def _bytes(sender, number):
    generator = torch.Generator().manual_seed(10 * sender + number)
    return torch.randint(256, (sum(SIZES[sender]),), generator=generator, dtype=torch.uint8)


def _all_to_all(worker, given, group):
    expected = [row[worker] for row in SIZES]
    out = torch.zeros(sum(expected), dtype=torch.uint8)
    return AllToAll(out, given, expected, SIZES[worker], worker, group)


def _theirs(given, worker, group):
    expected = [row[worker] for row in SIZES]
    out = torch.zeros(sum(expected), dtype=torch.uint8)
    dist.all_to_all_single(out, given, expected, SIZES[worker], group=group)
    return out


def _several_at_once():
    group, worker = dist.new_group(), dist.get_rank()
    collectives = [_all_to_all(worker, _bytes(worker, number), group) for number in range(4)]
    works = [collective.start() for collective in collectives]
    for work in reversed(works):  # in any order
        work.wait()
        work.wait()  # nothing more to wait for
    expected = [_theirs(_bytes(worker, number), worker, group) for number in range(4)]
    return [torch.equal(each.out, other) for each, other in zip(collectives, expected, strict=True)]


def test_all_to_all_brings_every_slice_to_its_place_however_many_are_under_way():
    assert run_world(_several_at_once, WORKERS) == [[True] * 4] * WORKERS


def _beside_messages_of_the_user():
    group, worker = dist.group.WORLD, dist.get_rank()
    sent, received = torch.full((8,), float(worker)), torch.empty(8)
    theirs = [dist.irecv(received, (worker - 1) % WORKERS), dist.isend(sent, (worker + 1) % WORKERS)]
    ours = _all_to_all(worker, _bytes(worker, 0), group)
    ours.start().wait()
    for work in theirs:
        work.wait()
    return float(received[0]), torch.equal(ours.out, _theirs(_bytes(worker, 0), worker, group))


def test_all_to_all_meets_nobody_elses_messages_on_the_same_group():
    assert run_world(_beside_messages_of_the_user, WORKERS) == [(2.0, True), (0.0, True), (1.0, True)]


def _one_stays_away():
    group, worker = dist.new_group(timeout=datetime.timedelta(seconds=2)), dist.get_rank()
    ending = ""
    if worker < 2:
        began = time.monotonic()
        numbers = torch.zeros(WORKERS, dtype=torch.uint8)
        with pytest.raises(RuntimeError) as failed:
            AllToAll(torch.zeros_like(numbers), numbers, [1] * WORKERS, [1] * WORKERS, worker, group).start().wait()
        assert time.monotonic() - began > 1
        ending = str(failed.value)
    dist.barrier()  # on a group of its own
    return ending


def test_all_to_all_without_one_ends_with_the_groups_time_out():
    *ends, away = run_world(_one_stays_away, WORKERS)
    assert not away and all("imed out" in each for each in ends), ends
