"""What must hold for every exchange, whatever scheme speaks over it: the network gives what virtual workers get."""

from functools import cache

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from helpers.exchanges import EXEMPT, ROWS, SAVED, SHAPES, STEPS, exact_mean, exercise, inputs, virtually
from helpers.gradients import error
from helpers.plain import die, run_plain
from helpers.specs import by_scheme, every_spec
from thinwire.exchange.server.frames import PUSH_BYTES
from thinwire.reducer import Reducer
from thinwire.schemes import parse

SCHEMES = by_scheme()
OVER = [
    pytest.param(row, name, id=f"{row.name}-{name}")
    for row in ROWS
    for name in SCHEMES
    if any(map(row.takes, SCHEMES[name])) or not row.only
]


@cache
def outcomes(row, name):
    """{(spec, feedback): [each worker's outcome]} of all variants of a scheme, and the same of the servers."""
    specs = [spec for spec in SCHEMES[name] if row.takes(spec)]
    # For biased schemes "auto" is True.
    cases = [(spec, feedback) for spec in specs for feedback in (("auto", True) if parse(spec).unbiased else ("auto",))]
    ranks = row.run(exercise, cases) if cases else []
    return {
        case: ([rank[case] for rank in ranks[row.servers :]], [rank[case] for rank in ranks[: row.servers]])
        for case in cases
    }


def to_the_bit(row, spec) -> bool:
    """More than two floats are added in an order of the all-reduce's own; a server adds all in rank order."""
    return row.workers <= 2 or parse(spec).rank_order


@pytest.mark.parametrize("row, name", OVER)
def test_the_network_gives_what_virtual_workers_get(row, name):
    for case, (workers, _) in outcomes(row, name).items():
        virtual = virtually(row, *case)
        for rank, outcome in enumerate(workers):
            for step, (mean, right) in enumerate(zip(outcome.means, virtual.means, strict=True)):
                for key in set(SHAPES) - set(EXEMPT):
                    if to_the_bit(row, case[0]):
                        assert torch.equal(mean[key], right[key]), (case, step, key)
                    else:
                        # The order may tip a choice between two equals: other entries, but as near to the truth.
                        exact = exact_mean(step, row.senders)[key]
                        ours, theirs = error(mean[key], exact), error(right[key], exact)
                        assert abs(ours - theirs) < 0.02 * (1 + theirs), (case, step, key)
            if to_the_bit(row, case[0]):
                assert outcome.memory.keys() == virtual.memories[rank].keys(), case
                for key, tensor in virtual.memories[rank].items():
                    assert torch.equal(outcome.memory[key], tensor), (case, key)


@pytest.mark.parametrize("row, name", OVER)
def test_all_workers_get_the_same_bits(row, name):
    for case, (workers, _) in outcomes(row, name).items():
        for outcome in workers[1:]:
            for mine, theirs in zip(outcome.means, workers[0].means, strict=True):
                assert all(torch.equal(mine[key], theirs[key]) for key in SHAPES), case


@pytest.mark.parametrize("row, name", OVER)
def test_exempt_tensors_travel_exact(row, name):
    for case, (workers, _) in outcomes(row, name).items():
        for step, mean in enumerate(workers[0].means):
            right = exact_mean(step, row.senders)["exact"]
            torch.testing.assert_close(mean["exact"].double(), right, rtol=1e-6, atol=1e-6)
        assert not [key for outcome in workers for key in outcome.memory if key[0].startswith(EXEMPT)], case


@pytest.mark.parametrize("row, name", OVER)
def test_a_resumed_worker_goes_on_with_the_same_bits(row, name):
    for case, (workers, _) in outcomes(row, name).items():
        for outcome in workers:
            assert len(outcome.resumed) == STEPS - SAVED
            for mine, theirs in zip(outcome.resumed, outcome.means[SAVED:], strict=True):
                assert all(torch.equal(mine[key], theirs[key]) for key in SHAPES), case


@pytest.mark.parametrize("row, name", OVER)
def test_counted_bytes_are_given_bytes(row, name):
    """What torch.distributed was given; between workers and servers, what the other end counted."""
    for case, (workers, servers) in outcomes(row, name).items():
        sent = sum(outcome.totals["bytes_sent"] for outcome in workers)
        if row.servers:
            farewell = PUSH_BYTES * row.workers  # the last frame, after the totals were taken
            assert sum(totals["bytes_received"] for totals in servers) == sent + farewell, case
        else:
            assert all(outcome.totals["bytes_given"] == outcome.given for outcome in workers), case
            inside = sum(outcome.totals.get("bytes_sent_inside", 0.0) for outcome in workers)
            outside = (sent - inside) / row.senders
            assert outside == pytest.approx(virtually(row, *case).bytes_sent, rel=0.02, abs=64 * STEPS), case


def _until_one_dies(row):
    def train(exchange, group):
        reducer = Reducer({"w": torch.empty(64, 64)}, "qsgd(bits=4)", group, exchange=exchange)
        for step in range(4):
            if step == 2 and exchange.worker == 1:
                die()
            reducer.reduce({"w": inputs(step, exchange.worker)["w"][:32, :].new_ones(64, 64)})
        workers = reducer.stats()["workers"]
        reducer.close()
        return workers

    return row.session(train)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_dead_worker_is_an_error_unless_the_exchange_goes_on(row):
    ends = run_plain(_until_one_dies, row.ranks, row, stuck=(row.servers + 1,))
    for rank, end in enumerate(ends[row.servers :]):
        if rank == 1:
            continue
        if row.goes_on:
            assert end.value == row.workers - 1, end.error
        else:
            assert "could not be exchanged" in end.error


def test_every_scheme_is_exercised():
    assert sorted(spec for specs in SCHEMES.values() for spec in specs) == sorted(every_spec())
    assert dist.is_available() and tw.AllReduce
