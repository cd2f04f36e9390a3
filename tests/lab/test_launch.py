"""The launcher: results in order of rank, the first failure as the reason, and nothing left running."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from thinwire.lab.runs import launch


def _told(place, factor):
    place.send(f"rank {place.rank} begins")
    assert torch.get_num_threads() == 1
    return factor * place.rank, place.ranks, torch.full((3,), float(place.rank))


def test_results_come_in_order_of_rank_and_messages_meanwhile():
    heard = []
    with launch.started(_told, 3, 10) as members:
        assert launch.listen(members, on_message=heard.append) is None
        results = [member.result for member in members]
    assert [(number, ranks) for number, ranks, _ in results] == [(0, 3), (10, 3), (20, 3)]
    assert [tensor.tolist() for *_, tensor in results] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert sorted(heard) == [f"rank {rank} begins" for rank in range(3)]
    assert multiprocessing.active_children() == []


def _second_fails_first(place):
    with place.joined():
        if place.rank == 1:
            raise ArithmeticError("this one began it")
        torch.distributed.barrier()


def test_the_first_that_fails_is_the_reason_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"rank 1 failed: ArithmeticError: this one began it(.|\n)*_second_fails_f"):
        launch.on_ranks(_second_fails_first, 3)
    assert multiprocessing.active_children() == []


def _divided(ten, by):
    return os.getpid(), ten // by


@pytest.mark.parametrize("processes", [1, 2, 5, None])
def test_jobs_are_shared_out_and_told_as_they_end(processes):
    found = {}
    jobs = [(torch.tensor(10), by) for by in (1, 2, 5)]
    launch.share_out(_divided, jobs, found.__setitem__, processes=processes)
    assert {number: int(result) for number, (_, result) in found.items()} == {0: 10, 1: 5, 2: 2}
    pids = {pid for pid, *_ in found.values()}
    assert (pids == {os.getpid()}) == (processes == 1) and len(pids) == min(3, processes or os.cpu_count())
    launch.share_out(_divided, [], found.__setitem__, processes=processes)
    with pytest.raises((RuntimeError, ZeroDivisionError), match=r"ZeroDivisionError|zero"):
        launch.share_out(_divided, [(10, 5), (10, 0)], found.__setitem__, processes=processes)
    assert multiprocessing.active_children() == []


def _killed(place):
    if place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_named_with_its_signal():
    with pytest.raises(RuntimeError, match="rank 0 was killed by SIGKILL"):
        launch.on_ranks(_killed, 2)


def test_two_threads_learn_how_their_own_processes_ended():
    """Starting a process asks after all others, and how one ended can be read once."""

    def codes(_):
        with launch.started(_killed, 2) as members:
            launch.listen(members, grace_seconds=None)
            return [member.exit_code() for member in members]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(codes, range(6))) == [[-signal.SIGKILL, 0]] * 6


def _hangs(place):
    if place.rank == 1:
        threading.Event().wait()


def test_who_hangs_is_named_and_ended():
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not end in 3 s"):
        launch.on_ranks(_hangs, 2, seconds=3)
    assert multiprocessing.active_children() == []
