"""A buffer with gaps is to every kernel what its stretches are end to end, and what lies in the gaps is left alone."""

import pytest
import torch
from blocks_data import buffers, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels import Levels, reference

anything = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LEVELS = Levels.of([-1.0, -0.4, 0.1, 1.0])
INSIDE = 7.25  # in every gap


class Apart:
    """A buffer's stretches, moved apart."""

    def __init__(self, buffer, gaps):
        lengths = torch.diff(buffer.starts).tolist()
        spans, at = [], gaps[0]
        for length, gap in zip(lengths, gaps[1:], strict=False):
            spans.append((at, at + length))
            at += length + gap
        self.numel = at
        self.starts = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)
        self.places = torch.cat([torch.arange(0), *(torch.arange(*span) for span in spans)])

    def take(self, wide):
        return wide[self.places]

    def put(self, x):
        wide = torch.full((self.numel,), INSIDE, dtype=x.dtype)
        wide[self.places] = x
        return wide

    def gaps_of(self, wide):
        kept = torch.ones(self.numel, dtype=torch.bool)
        kept[self.places] = False
        return wide[kept]


@st.composite
def apart(draw, *, finite=False):
    buffer = draw(buffers(finite=finite))
    return buffer, Apart(buffer, draw(st.lists(st.integers(0, 90), min_size=6, max_size=6)))


def check(wide, x, where):
    assert same_bits(where.take(wide), x)
    assert bool((where.gaps_of(wide) == INSIDE).all())


@anything
@given(apart(), st.booleans())
def test_statistics(backend, data, owed):
    buffer, where = data
    more = torch.randn(buffer.x.numel(), generator=torch.Generator().manual_seed(3))
    made = []
    for x, starts, put in ((buffer.x, buffer.starts, lambda x: x), (where.put(buffer.x), where.starts, where.put)):
        outs = {name: torch.empty(buffer.blocks) for name in ("absmean", "absmax", "square")}
        total = put(torch.zeros_like(buffer.x))
        with_owed = {"owed": put(more), "total": total} if owed else {}
        backend.block_statistics(x, starts, buffer.block, **outs, **with_owed)
        made.append((outs, total))
    for name in made[0][0]:
        assert same_bits(made[0][0][name], made[1][0][name])
    check(made[1][1], made[0][1], where)


@anything
@given(apart(), st.sampled_from(["uniform", "levels", "laplace"]), st.booleans(), st.booleans())
def test_quantisers_there_and_back(backend, data, kind, drawn, losing):
    buffer, where = data
    block = buffer.block if kind != "laplace" else min(max(buffer.block, 8), 4096)
    quantize_laplace = getattr(backend, "quantize_laplace", reference.quantize_laplace)  # as calls find it
    bits = 2
    buffer.block = block
    ranges = torch.rand(buffer.blocks, generator=torch.Generator().manual_seed(5)) * 2
    made = []
    for x, starts, put in ((buffer.x, buffer.starts, lambda x: x), (where.put(buffer.x), where.starts, where.put)):
        codes, lost, radius = buffer.codes(bits), put(torch.zeros_like(buffer.x)), ranges.clone()
        how = {"keys": buffer.keys if drawn else None, "counters": buffer.counters, "out": codes}
        how |= {"lost": lost} if losing else {}
        if kind == "uniform":
            backend.quantize_uniform(x, starts, block, bits, radius, **how)
        elif kind == "levels":
            backend.quantize_levels(x, starts, block, LEVELS, radius, **how)
        else:
            quantize_laplace(x, starts, block, LEVELS, 1.5, moments=True, radius=radius, **how)
        add, sum_ = put(torch.ones_like(buffer.x)), put(torch.ones_like(buffer.x))
        by = (starts, block, bits if kind == "uniform" else LEVELS)
        name = "uniform" if kind == "uniform" else "levels"
        getattr(backend, f"dequantize_{name}_add")(codes, *by, radius, 0.5, out=add)
        finite = getattr(backend, f"dequantize_{name}_sum")([codes, codes], *by, [radius, radius], 0.5, out=sum_)
        made.append((codes, radius, finite, (lost, add, sum_)))
    (codes, radius, finite, there), (wide_codes, wide_radius, wide_finite, wide_there) = made
    assert torch.equal(codes, wide_codes) and finite == wide_finite and same_bits(radius, wide_radius)
    for wide, x in zip(wide_there, there, strict=True):
        check(wide, x, where)


@anything
@given(apart(), st.data(), st.booleans(), st.booleans())
def test_top_k(backend, data, draw, weighted, owed):
    buffer, where = data
    k = draw.draw(st.integers(0, buffer.x.numel()))
    generator = torch.Generator().manual_seed(3)
    weight, more = (torch.randn(buffer.x.numel(), generator=generator).abs() for _ in range(2))
    total, wide_total = torch.zeros_like(buffer.x), where.put(torch.zeros_like(buffer.x))
    found = backend.top_k(
        buffer.x, k, weight if weighted else None, **({"owed": more, "total": total} if owed else {})
    )  # fmt: skip
    wide = backend.top_k(
        where.put(buffer.x), k, where.put(weight) if weighted else None, starts=where.starts,
        **({"owed": where.put(more), "total": wide_total} if owed else {}),
    )  # fmt: skip
    assert torch.equal(wide.long(), where.places[found.long()])
    check(wide_total, total, where)


@pytest.mark.parametrize("zeros", [0.0, 0.995, 1.0])
def test_top_k_of_long_buffers_takes_nothing_from_a_gap(backend, zeros):
    """Long enough to be sampled: even where there are fewer elements than are wanted that are not 0."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60_000, generator=generator)
    x[torch.rand(60_000, generator=generator) < zeros] = 0
    starts = torch.tensor([[0, 20_000], [20_100, 20_100], [30_000, 60_000]])
    inside = torch.cat([torch.arange(0, 20_000), torch.arange(30_000, 60_000)])
    for k in (1, 500, 2_000, 50_000):
        found = backend.top_k(x, k, starts=starts)
        assert torch.equal(found.long(), inside[backend.top_k(x[inside], k).long()])


@anything
@given(apart(), st.data())
def test_draws(backend, data, draw):
    buffer, where = data
    few = [0]
    for length in torch.diff(buffer.starts).tolist():
        few.append(few[-1] + draw.draw(st.integers(0, length)))
    few = torch.tensor(few)
    found, wide = (torch.empty(int(few[-1]), dtype=torch.int32) for _ in range(2))
    backend.draw_places(buffer.starts, few, buffer.keys, found)
    backend.draw_places(where.starts, few, buffer.keys, wide)
    assert torch.equal(wide.long(), where.places[found.long()])


def test_bad_gaps_are_refused():
    x = torch.zeros(10)
    for spans, said in (([[0, 4], [3, 6]], "must not decrease"), ([[0, 4], [6, 11]], "must end at 10 at most")):
        with pytest.raises(ValueError, match=said):
            kernels.top_k(x, 2, starts=torch.tensor(spans))
        with pytest.raises(ValueError, match=said):
            kernels.block_absmax(x, torch.tensor(spans), 4, out=torch.zeros(3))
    with pytest.raises(ValueError, match="k must be"):
        kernels.top_k(x, 7, starts=torch.tensor([[0, 3], [6, 9]]))
    with pytest.raises(ValueError, match="without gaps"):
        keys = torch.zeros(1, dtype=torch.int64)
        kernels.hadamard_(x, torch.tensor([[0, 8]]), 8, keys=keys, counters=keys)
