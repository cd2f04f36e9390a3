"""Memory that the workers of a machine see: who has it, what is left of it, and that nobody reads what is not there yet
or is there no more."""

import os
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from helpers.exchanges import grid
from helpers.world import run_world
from thinwire.core.layout import Layout
from thinwire.exchange import hierarchical, scatter, shared
from thinwire.exchange.shared import Shared
from thinwire.kernels import native
from thinwire.reducer import Reducer

# -- memory ------------------------------------------------------------------------------------------------------------


def _written_and_read():
    worker = dist.get_rank()
    memory = Shared.join(dist.group.WORLD, regions=2)
    found = []
    for nbytes in (1, 5000, 3):  # it grows, and what was there stays
        memory.memory(worker, 1, nbytes)[-1] = 10 * nbytes % 251 + worker
        dist.barrier()
        found.append([int(memory.memory(other, 1, nbytes)[-1]) for other in range(2)])
        dist.barrier()
    assert int(memory.memory(worker, 0, 5000)[16:].sum()) == 0, "regions are apart"
    memory.close()
    memory.close()
    return found


def test_what_one_worker_writes_all_read():
    right = [[10 * nbytes % 251 + worker for worker in range(2)] for nbytes in (1, 5000, 3)]
    assert run_world(_written_and_read, 2) == [right, right]


def _asked_for(rank, how):
    if dist.get_rank() == rank and how == "not Linux":
        del os.memfd_create
    if dist.get_rank() == rank and how == "another container":
        shared._opened = lambda path, secret: None
    if dist.get_rank() == rank and how == "the same numbers elsewhere":
        opened = shared._opened
        shared._opened = lambda path, secret: opened(path, "00" * shared.SECRET_BYTES)
    if dist.get_rank() == rank and how == "no compiled kernels":
        shared.native.module = lambda: None
    before = set(os.listdir("/proc/self/fd"))
    memory = Shared.join(dist.group.WORLD, 2, wanted=dist.get_rank() != rank or how != "not wanted")
    return memory is None, len(set(os.listdir("/proc/self/fd")) - before)


REASONS = ["not wanted", "not Linux", "another container", "the same numbers elsewhere", "no compiled kernels"]


@pytest.mark.parametrize("how", REASONS)
def test_where_one_cannot_see_another_nobody_has_it(how):
    assert run_world(_asked_for, 2, 1, how) == [(True, 0)] * 2


def _descriptors():
    counts = []
    for _ in range(3):
        inner, outer = grid(2)
        tensors = {"w": torch.empty(300, 300)}
        with Reducer(tensors, "qsgd", dist.group.WORLD, exchange=tw.Hierarchical(inner=inner, outer=outer)) as each:
            assert each.exchange._shared is not None
            each.reduce({"w": torch.randn(300, 300)})
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:thinwire" in line for line in maps)
        counts.append((sum("thinwire" in _target(file) for file in os.listdir("/proc/self/fd")), mapped))
    return counts


def _target(file):
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:  # that of the listing itself
        return ""


def test_a_closed_exchange_leaves_no_descriptor_and_no_mapping():
    assert run_world(_descriptors, 2) == [[(0, 0)] * 3] * 2


# -- words -------------------------------------------------------------------------------------------------------------


def _spoken():
    """Words of two lines, said and heard in orders that differ; what was written before a word is there after it."""
    memory, worker = Shared.join(dist.group.WORLD, regions=1), dist.get_rank()
    dawdle = random.Random(worker)
    found = []
    for turn in range(200):
        memory.memory(worker, 0, 8)[turn % 8] = turn
        first = memory.say(0)
        if dawdle.random() < 0.1:
            time.sleep(0.001)
        second = memory.say(1)
        for line, number in ((1, second), (0, first)) if worker else ((0, first), (1, second)):
            memory.hear(line, number)
        found += [int(memory.memory(other, 0, 8)[turn % 8]) == turn for other in range(3)]
        assert first == second == turn + 1
    memory.close()
    return len(found), all(found)


def test_nobody_reads_before_it_was_said():
    assert run_world(_spoken, 3) == [(600, True)] * 3


def _silent(how):
    group = dist.new_group(timeout=timedelta(seconds=1))
    memory = Shared.join(group, regions=1)
    if dist.get_rank() == 1:
        if how == "closed":
            memory.close()
        time.sleep(3)
        memory.close()
        return None
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        memory.hear(0, memory.say(0))
    memory.close()
    return str(caught.value), time.monotonic() - began < 2.5


@pytest.mark.parametrize(
    ("how", "said"), [("closed", "is gone, or has closed its wire"), ("silent", "said nothing for 1 seconds")]
)
def test_whoever_says_nothing_is_named_in_time(how, said):
    (message, in_time), _ = run_world(_silent, 2, how)
    assert message == f"worker 1 of this machine {said}" and in_time


def test_words_wrap_around():
    """Counts are 32 bits wide, and a job may go on for longer."""
    words = torch.zeros(2, dtype=torch.int32)
    module, address = native.module(), words.data_ptr()
    module.say(address, 2**32 - 1)
    assert module.hear(address, 2**32 - 1, 0) and module.hear(address, 2**32 - 2, 0)
    assert not module.hear(address, 0, 0.01)
    module.say(address, 0)
    assert module.hear(address, 2**32 - 1, 0) and module.hear(address, 0, 0) and not module.hear(address, 1, 0.01)


# -- in an exchange ----------------------------------------------------------------------------------------------------

BUCKETS = [[(f"b{number}-{place}", (rows, 40)) for place, rows in enumerate(rows)] for number, rows in enumerate(
    [(300,), (3,), (170, 20), (1,), (400, 5, 90), (64,), (2, 2), (500,), (120,), (33,), (250, 1)]
)]  # fmt: skip


def _steps(memory, hasty):
    """The means of buckets that are all under way at once, where workers dawdle now and then."""
    dawdle = random.Random(dist.get_rank())
    for name in ("scatter", "gather") if hasty else ():
        plain = getattr(scatter, name)

        def slowly(*arguments, plain=plain):
            time.sleep(dawdle.choice([0, 0, 0.002, 0.01]))
            mean = yield from plain(*arguments)
            time.sleep(dawdle.choice([0, 0, 0.002]))
            return mean

        setattr(scatter, name, slowly)
    tensors = {name: torch.empty(shape) for bucket in BUCKETS for name, shape in bucket}
    inner, outer = grid(2)
    exchange = tw.Hierarchical(inner=inner, outer=outer, memory=memory, whole=1000)
    found = []
    with Reducer(tensors, "powersgd(factor_rank=2)", dist.group.WORLD, exchange=exchange) as reducer:
        assert (exchange._shared is not None) == memory
        for step in range(4):
            torch.manual_seed(100 * step + dist.get_rank())
            buffers = [(torch.randn(Layout.of(bucket).numel), Layout.of(bucket)) for bucket in BUCKETS]
            reducer.begin_step()
            for number, (buffer, layout) in enumerate(buffers):
                reducer.submit(buffer, layout, last=number + 1 == len(buffers), done=lambda error: None)
            reducer.end_step()
            found.append([buffer for buffer, _ in buffers])
    return found


def test_through_memory_come_the_same_bits_as_by_sockets_however_workers_dawdle():
    """Buckets of other sizes take the same regions in turn; more are under way than there are."""
    assert len(BUCKETS) > 2 * hierarchical.DEPTH
    sockets = run_world(_steps, 4, False, False)
    for ranks in (run_world(_steps, 4, True, False), run_world(_steps, 4, True, True)):
        for mine, theirs in zip(ranks, sockets, strict=True):
            for step, other in zip(mine, theirs, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(step, other, strict=True))


def _falls_back():
    if dist.get_rank() == 2:
        del os.memfd_create
    inner, outer = grid(2)
    exchange = tw.Hierarchical(inner=inner, outer=outer)
    with Reducer({"w": torch.empty(50, 50)}, "fp32", dist.group.WORLD, exchange=exchange) as reducer:
        mean = reducer.reduce({"w": torch.full((50, 50), float(dist.get_rank()))})["w"]
        return exchange._shared is not None, mean.unique().tolist()


def test_one_machine_without_it_goes_by_sockets_and_the_other_does_not():
    assert run_world(_falls_back, 4) == [(True, [1.5]), (True, [1.5]), (False, [1.5]), (False, [1.5])]
