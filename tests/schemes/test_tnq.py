"""TNQ and its ablations: the table of errors, bias, edge tensors, tails, budgets, what travels."""

import math

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.core import theory
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.schemes import _banks, parse


def laplace(count, seed=0, scale=1.0):
    return torch.from_numpy(np.random.default_rng(seed).laplace(scale=scale, size=count)).float()


def student(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_t(3, count)).float()


def said(spec, x, step=0):
    """What one worker's message says of x."""
    codec = parse(spec)
    bucket = Bucket(x.reshape(-1).clone(), Layout.of([("x", x.shape)]), step=step)
    out = torch.zeros(x.numel(), dtype=x.dtype)
    codec.decode_add(codec.payload(bucket, codec.level).data, bucket.layout, codec.level, out, 1.0)
    return out.view(x.shape)


def mse(spec, x):
    return float((said(spec, x) - x).square().mean())


TABLE = {2: (21.2, 4.13, 0.548, 0.522), 3: (3.30, 0.481, 0.221, 0.187), 4: (0.644, 0.087, 0.083, 0.057)}


@pytest.mark.parametrize("bits", TABLE)
def test_errors_on_laplace_data(bits):
    """The table of the theory, measured: a million entries, in units of the scale squared."""
    x = laplace(1_000_000, scale=0.01)
    c2 = float(x.abs().mean()) ** 2
    qsgd = mse(f"qsgd(bits={bits}, block=1048576)", x) / c2
    nq, tq, tnq = (mse(f"{name}(bits={bits}, group='tensor')", x) / c2 for name in ("nq", "tq", "tnq"))
    expected = TABLE[bits]
    assert qsgd == pytest.approx(expected[0], rel=0.2)  # the range is a sample maximum
    assert nq == pytest.approx(expected[1], rel=0.2)
    assert tq == pytest.approx(expected[2], rel=0.02)
    assert tnq == pytest.approx(expected[3], rel=0.02)
    assert tnq < tq < nq < qsgd
    for default in (f"tnq(bits={bits})", f"tnq(bits={bits}, scale='mean')"):
        assert mse(default, x) / c2 == pytest.approx(expected[3], rel=0.02)


@pytest.mark.parametrize("spec", ["tnq(bits={})", "tnq(bits={}, constant='average')", "tnq(bits={}, group=1024)"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_bound_holds_on_laplace_data(spec, bits):
    x = laplace(200_000, seed=bits)
    assert mse(spec.format(bits), x) <= theory.laplace_bound(bits, scale=float(x.abs().mean()))


def test_the_mean_of_many_workers_keeps_the_bound():
    workers = 8
    tensors = [laplace(20_000, seed=i) for i in range(workers)]
    mean = tw.Simulation("tnq(bits=3)", workers=workers, feedback=False, route="gather").reduce(tensors)
    error = float((mean - sum(tensors) / workers).square().sum())
    assert error <= theory.laplace_bound(3, numel=20_000, workers=workers)


@pytest.mark.parametrize(("spec", "threshold"), [
    ("tnq(bits=2)", theory.laplace_threshold(2)),
    ("tnq(bits=4)", theory.laplace_threshold(4)),
    ("tnq(bits=3, group=256)", 0.8 * theory.laplace_threshold(3)),  # every group has a scale of its own
    ("tq(bits=3)", theory.uniform_threshold(3)),
])  # fmt: skip
def test_unbiased_inside_the_threshold(spec, threshold):
    """The mean of T messages is T times closer than one, over the entries that are not clipped.

    The ratio has mean 1 and over more than 3,000 entries a deviation under 0.04: 1.3 is far outside.
    """
    x, repeats = laplace(4096, seed=3), 64
    results = torch.stack([said(spec, x, step=t) for t in range(repeats)]).double()
    inside = x.abs() < threshold * x.abs().mean()
    assert 3000 < int(inside.sum()) < 4096
    single = (results - x).square().mean(0)[inside].mean()
    together = (results.mean(0) - x).square()[inside].mean()
    assert 0.7 < float(together / single) * repeats < 1.3


def test_beyond_the_threshold_the_top_level_is_said():
    x = laplace(4096)
    a = theory.laplace_threshold(4, scale=float(x.abs().mean()))
    beyond = x.abs() > 1.001 * a
    assert int(beyond.sum()) > 5
    assert said("tnq(group='tensor', scale='mean')", x)[beyond].abs().numpy() == pytest.approx(a, rel=1e-5)


EDGES = {
    "zero": torch.zeros(1000),
    "constant": torch.full((1000,), -0.3),
    "one element": torch.tensor([3.7]),
    "one value, both signs": torch.tensor([2.0, -2.0] * 50),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(
    "spec",
    ["tnq(bits=2)", "tnq", "tnq(bits=8)", "tnq(group=64)", "tnq(model='powerlaw')", "tq", "nq", "signsgd", "terngrad"],
)
def test_plain_tensors_are_exact(spec, edge):
    assert torch.equal(said(spec, EDGES[edge]), EDGES[edge])


@pytest.mark.parametrize(
    "spec", ["tnq(bits=2, group='tensor')", "tnq(group='tensor')", "nq(group='tensor')", "natural"]
)
def test_all_mass_in_one_entry(spec):
    x = torch.zeros(10_000)
    x[1234] = 8.0
    y = said(spec, x)
    assert float(y[1234]) == pytest.approx(8.0)
    assert float((y - x).norm()) < 0.02 * 8.0


@pytest.mark.parametrize("spec", ["tnq(bits=1)", "tq(group=256)", "tnq(group=256)", "signsgd"])
def test_what_clipping_takes_from_one_entry_comes_later(spec):
    """Without inner levels to spare, one large entry is clipped; error memory delivers it."""
    x = torch.zeros(256)
    x[17] = 1.0
    simulation = tw.Simulation(spec, workers=1)
    came = simulation.reduce([x])
    for _ in range(200):
        came = came + simulation.reduce([torch.zeros(256)])
    assert float((came - x).norm()) < 0.5


@pytest.mark.parametrize("magnitude", [1e-44, 1e-40, 1e-37, 1e37])
@pytest.mark.parametrize(
    "spec",
    ["tnq", "tnq(bits=8)", "tnq(group=64)", "tnq(model='powerlaw')", "tq", "nq", "terngrad", "signsgd", "natural"],
)
def test_tiny_and_huge(spec, magnitude):
    x = laplace(1000) * magnitude
    y = said(spec, x)
    assert torch.isfinite(y).all()
    # Ranges under 2^-120 count as 0; above that, errors are those of any other magnitude.
    assert float((y - x).abs().max()) <= max(10 * magnitude, 2e-36)


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_the_power_law_beats_laplace_on_heavy_tails(bits):
    x = student(300_000)
    laplace_error = mse(f"tnq(bits={bits})", x)
    errors = {levels: mse(f"tnq(bits={bits}, model='powerlaw', levels='{levels}')", x) for levels in theory.SHAPES}
    assert errors["nonuniform"] < min(laplace_error, mse(f"tnq(bits={bits}, group='tensor')", x))
    assert errors["nonuniform"] < errors["biscaled"] < errors["uniform"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_a_sample_does_not_show_still_makes_a_tensor_not_finite(bad):
    x = student(40_000)
    x[1] = bad  # every third is looked at
    assert not bool(said("tnq(model='powerlaw')", x).isfinite().any())


@pytest.fixture
def unseen(monkeypatch):
    """Nothing is at hand, as on a device."""
    for place in ("thinwire.kernels.at_hand", "thinwire.kernels.blockstats.at_hand"):
        monkeypatch.setattr(place, lambda x: False)


DEVICE_SPECS = [
    "tnq(group='tensor')", "tnq(bits=8, group='tensor', constant='average')", "tnq(bits=1, group='tensor')",
    "nq(group='tensor')", "nq(bits=7, group='tensor')", "tnq(model='powerlaw')", "tnq(model='powerlaw', bits=2)",
    "tnq(model='powerlaw', levels='uniform')",
]  # fmt: skip


@pytest.mark.parametrize("spec", DEVICE_SPECS)
def test_tables_of_a_bank_say_the_same_to_the_bit(spec, unseen, monkeypatch):
    """Of tensors of every kind: with tails, without, one entry alone, constant, zero, not finite, tiny, huge."""
    alone = torch.zeros(999)
    alone[7] = 5.0
    kinds = [
        student(30_011), laplace(5000), student(900, 1), alone, torch.ones(64), torch.zeros(40), laplace(300),
        laplace(5000) * 1e-40, laplace(5000) * 1e34, student(70_000, 3).clamp(-2, 2), laplace(2000) / 0, laplace(1),
    ]  # fmt: skip
    layout = Layout.of([(str(number), kind.shape) for number, kind in enumerate(kinds)])
    codec, made = parse(spec), []
    for at_hand in (False, True):
        with monkeypatch.context() as patch:
            if at_hand:
                patch.setattr("thinwire.kernels.at_hand", lambda x: True)
            lost, out = torch.zeros(layout.numel), torch.zeros(layout.numel)
            bucket = Bucket(torch.cat(kinds), layout, lost=lost)
            data = codec.payload(bucket, codec.level)
            codec.decode_add(data, layout, codec.level, out, 0.3)
            made.append((data, lost, out))
    for ours, theirs in zip(*made, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("shape", theory.SHAPES)
def test_power_laws_are_fitted_alike_and_have_the_same_tables(shape):
    magnitudes = [student(count, seed).abs() for seed, count in enumerate((320, 500, 4000, 16_384))]
    magnitudes += [magnitudes[2] * 1e-30, laplace(1000).abs(), torch.zeros(400), torch.full((400,), math.nan)]
    fits = _banks.fit_power_laws(magnitudes, 3, shape)
    laws = [theory.PowerLaw.fit(each, 3, shape) for each in magnitudes]
    assert [law is not None for law in laws] == (fits.exponent > 0).tolist()
    assert sum(law is not None for law in laws) >= 3
    known = [number for number, law in enumerate(laws) if law is not None]
    for number in known:
        law, (threshold, knee, exponent, tail) = laws[number], (float(each[number]) for each in fits)
        assert exponent == law.exponent and tail == pytest.approx(law.tail, rel=1e-7)
        assert knee == pytest.approx(law.knee, rel=1e-12)
        assert threshold == pytest.approx(law.threshold(3, shape), rel=1e-12)
    ratios = [float(np.float32(2 ** (number / 16))) for number in (1, 9, 40)]
    rows = torch.tensor([[ratio, laws[known[0]].exponent, 0.05] for ratio in ratios])
    bank, row = _banks.PowerLaw(3, shape=shape).bank(rows)
    for number, each in enumerate(rows.tolist()):
        assert torch.equal(bank[row[number], :, 0], _banks.power_law(3, shape, *each).table)


@pytest.mark.parametrize("spec", ["tnq(group='tensor')", "tnq(model='powerlaw')", "nq(group='tensor')"])
def test_senseless_shapes_decode_to_nan_where_nobody_looks(spec, unseen):
    codec, layout = parse(spec), Layout.of([("a", (40,)), ("b", (50,))])
    for bad in (-1.0, 0.0, math.inf, math.nan):
        data = codec.payload(Bucket(laplace(90), layout), codec.level)
        data[8 : data.numel() - 45].view(torch.float32)[0] = bad
        out = torch.zeros(90)
        codec.decode_add(data, layout, codec.level, out, 1.0)
        assert bool(out[:40].isnan().all()) and bool(out[40:].isfinite().all())


def test_fallbacks_are_counted():
    scheme = parse("tnq(model='powerlaw')")
    simulation = tw.Simulation(scheme, workers=1, feedback=True)
    gaussian = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, 5000)).float()
    for _ in range(3):
        simulation.reduce([{"heavy": student(5000), "short": torch.ones(40), "flat": gaussian}])
    assert simulation.scheme.report(simulation.memories[0]) == {"powerlaw_fallbacks": 6.0}
    assert parse("tnq").report(simulation.memories[0]) == {}


def tensors_of_many_scales(seed):
    return {
        "large": laplace(6000, seed, 1.0).view(60, 100),
        "small": laplace(4000, seed + 50, 0.01),
        "middle": laplace(2000, seed + 90, 0.2).view(20, 100),
    }


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("group", ["'tensor'", "128"])
def test_a_budget_is_kept_and_used_well(workers, group):
    given = [tensors_of_many_scales(10 * i) for i in range(workers)]

    def error(spec):
        simulation = tw.Simulation(spec, workers=workers, feedback=False, route="gather")
        mean = simulation.reduce(given)
        exact = {name: sum(g[name] for g in given) / workers for name in given[0]}
        return sum(float((mean[name] - exact[name]).square().sum()) for name in exact), simulation.bytes_sent

    fixed, fixed_bytes = error(f"tnq(bits=4, group={group})")
    shared, shared_bytes = error(f"tnq(budget=4.0, group={group})")
    assert shared < 0.5 * fixed
    assert shared_bytes <= fixed_bytes + (workers - 1) * 3 * 16 + 2 * 3 * 4  # padding of each part, and the scales


def test_a_budget_with_memory_loses_nothing():
    simulation = tw.Simulation("tnq(budget=2.5)", workers=2)
    came = exact = 0.0
    for step in range(6):
        given = [tensors_of_many_scales(100 * step + i) for i in range(2)]
        mean = simulation.reduce(given)
        came = came + torch.cat([t.reshape(-1).double() for t in mean.values()])
        exact = exact + torch.cat([sum(g[n] for g in given).reshape(-1).double() / 2 for n in mean])
    owed = torch.cat([
        sum(m[name, "residual"].double() for m in simulation.memories).reshape(-1) / 2 for name in mean
    ])  # fmt: skip
    assert float((came + owed - exact).norm()) < 1e-5 * float(exact.norm())


def test_a_budget_is_turned_by_the_knob():
    scheme = parse("tnq(budget=3.2)")
    assert scheme.knob.name == "budget" and scheme.level == 3.2
    simulation = tw.Simulation(scheme, workers=2, feedback=False)
    sent = []
    for level in (1, 3.2, 8):
        before = simulation.bytes_sent
        simulation.reduce([tensors_of_many_scales(i) for i in range(2)], level=level)
        sent.append(simulation.bytes_sent - before)
    assert sent[0] < sent[1] < sent[2]
    bits = 8 * (sent[1] - 2 * 3 * 8 / 2 * 1) / 12_000  # two workers' gather: a payload each
    assert 2.8 < bits <= 3.3


@pytest.mark.parametrize("workers", [2, 4])
def test_the_wire_cost_is_bits_and_scales(workers):
    """TNQ at 4 bits against fp16, by what leaves a worker."""
    tensors = [{"w": laplace(40_000, i).view(200, 200), "v": laplace(20_000, i + 9)} for i in range(workers)]
    sent = {}
    for spec in ("tnq(bits=4)", "tnq(bits=4, group='tensor')", "fp16"):
        simulation = tw.Simulation(spec, workers=workers)
        simulation.reduce(tensors)
        sent[spec] = simulation.bytes_sent
    passes = 2 * (workers - 1) / workers
    assert sent["fp16"] == passes * 2 * 60_000
    assert 8 * sent["tnq(bits=4, group='tensor')"] / passes / 60_000 == pytest.approx(4.0, rel=0.01)
    assert 8 * sent["tnq(bits=4)"] / passes / 60_000 == pytest.approx(4 + 32 / 1024, rel=0.03)  # whole blocks per part
    assert sent["tnq(bits=4)"] <= 0.3 * sent["fp16"]


def test_a_part_of_a_tensor_has_its_own_scale():
    """Two-shot cuts tensors: a part is encoded by itself and the mean is as good."""
    tensors = [torch.cat([laplace(4096, i), 100 * laplace(4096, i + 5)]) for i in range(4)]
    exact = sum(tensors) / 4
    for spec in ("tnq(bits=6)", "tnq(bits=6, group='tensor')"):
        mean = tw.Simulation(spec, workers=4, feedback=False, route="two-shot").reduce(tensors)
        for half in (slice(0, 4096), slice(4096, 8192)):
            assert float((mean[half] - exact[half]).norm() / exact[half].norm()) < 0.15


@pytest.mark.parametrize(("spec", "message"), [
    ("tnq(bits=9)", r"bits must be 1\.\.8, got 9"),
    ("tnq(group=12)", "multiple of 8, got 12"),
    ("tnq(group='block')", "multiple of 8, got 'block'"),
    ("tnq(model='normal')", "'laplace' or 'powerlaw', got 'normal'"),
    ("tnq(scale='max')", "'moments' or 'mean', got 'max'"),
    ("tnq(constant='best')", "'worst' or 'average', got 'best'"),
    ("tnq(levels='uniform')", "needs model='powerlaw'"),
    ("tnq(model='powerlaw', group=64)", "group must be 'tensor', got 64"),
    ("tnq(model='powerlaw', levels='log')", "uniform, nonuniform, biscaled, got 'log'"),
    ("tnq(budget=0.5)", r"budget must be 1\.\.8 bits per coordinate, got 0.5"),
    ("tq(bits=0)", r"bits must be 1\.\.8, got 0"),
    ("tq(group=7)", "multiple of 8, got 7"),
    ("nq(bits=16)", r"bits must be 1\.\.8, got 16"),
])  # fmt: skip
def test_mistakes_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


@pytest.mark.parametrize("spec", ["tnq(group='tensor')", "tnq(model='powerlaw')", "nq(group='tensor')"])
def test_senseless_shapes_are_refused(spec):
    codec = parse(spec)
    x = student(5000)
    bucket = Bucket.of(x)
    data = codec.payload(bucket, 4).data.clone()
    for senseless in (math.nan, math.inf, -1.0, 0.0):
        data[4:8] = torch.tensor([senseless]).view(torch.uint8)
        out = torch.zeros(5000)
        with pytest.raises(ValueError, match="in a payload"):
            codec.decode_add(data, bucket.layout, 4, out, 1.0)
        assert not out.any()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_moments_find_the_range_where_many_entries_are_near_zero(bits):
    """Seven of eight entries zero, the rest Laplace: mean |x| is an eighth of the scale that matters."""
    x = laplace(65_536) * (torch.arange(65_536) % 8 == 0)
    assert mse(f"tnq(bits={bits})", x) < 0.85 * mse(f"tnq(bits={bits}, scale='mean')", x)
