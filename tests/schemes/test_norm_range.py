"""QSGD over the 2-norm and NUQSGD: held against numpy, entry by entry, with the draws of the kernels."""

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.kernels.backends.reference.draws import random_unit

LAYOUT = Layout.of([("a", (37, 40)), ("b", (129,))])


def entries(seed=0):
    random = np.random.default_rng(seed)
    return random.laplace(size=LAYOUT.numel).astype(np.float32)


def magnitudes(spec, bits):
    count = 2 ** (bits - 1) - 1
    return np.arange(count + 1) / count if spec.startswith("qsgd") else np.r_[0.0, 0.5 ** np.arange(count)[::-1]]


def by_the_book(x, bucket, levels, block, norm):
    """Sign and magnitude, group by group; up with the probability that makes the mean right."""
    out = np.empty(len(x))
    for number, segment in enumerate(LAYOUT.segments):
        draws = random_unit(bucket.keys()[number], torch.arange(segment.numel)).numpy()
        for start in range(0, segment.numel, block):
            at = slice(segment.start + start, min(segment.start + start + block, segment.stop))
            part, draw = x[at].astype(np.float64), draws[start : start + block]
            radius = np.sqrt((part**2).sum()) if norm else np.abs(part).max()
            signed = np.r_[-levels[:0:-1], levels] * radius
            below = np.clip(np.searchsorted(signed, part, side="right") - 1, 0, len(signed) - 2)
            low, high = signed[below], signed[below + 1]
            out[at] = np.where(draw < (part - low) / (high - low), high, low)
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 7])
@pytest.mark.parametrize(
    "spec, block, norm",
    [
        ("qsgd(bits={}, range='norm', block=64)", 64, True),
        ("qsgd(bits={}, range='norm', block=1073741824)", 1 << 30, True),
        ("nuqsgd(bits={}, group=64)", 64, True),
        ("nuqsgd(bits={}, group='tensor')", 1 << 30, True),
        ("nuqsgd(bits={}, group='tensor', range='max')", 1 << 30, False),
    ],
)
def test_it_is_sign_and_magnitude_rounded_at_random(spec, block, norm, bits):
    codec, x = tw.scheme(spec.format(bits)), entries()
    bucket = Bucket(torch.from_numpy(x.copy()), LAYOUT, lost=torch.empty(LAYOUT.numel), step=3, seed=5)
    out = torch.zeros(LAYOUT.numel)
    payload = codec.payload(bucket, codec.level)
    codec.decode_add(payload, LAYOUT, codec.level, out, 1.0)
    expected = by_the_book(x, bucket, magnitudes(spec, bits), block, norm)
    # Float32 divides otherwise than numpy: where a draw lies within rounding of its probability, it may fall otherwise.
    differs = ~np.isclose(out.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert differs.mean() < 1e-3
    torch.testing.assert_close(bucket.lost, torch.from_numpy(x) - out)
    groups = sum(-(-segment.numel // block) for segment in LAYOUT.segments)
    packed = sum(
        -(-min(block, segment.numel - start) * bits // 8)
        for segment in LAYOUT.segments
        for start in range(0, segment.numel, block)
    )
    assert payload.numel() == 4 * groups + packed


def test_the_norm_costs_more_than_the_maximum():
    """The error of the paper's range grows with the root of the length; halving levels mend most of that."""
    x = torch.from_numpy(entries())

    def error(spec):
        return (tw.Simulation(spec, workers=1).reduce([x]) - x).square().sum().item()

    norm, halves, largest = error("qsgd(range='norm')"), error("nuqsgd"), error("qsgd")
    assert largest < halves < norm


@pytest.mark.parametrize("scale", [1e-25, 1e-19, 1e19, 1e30])
@pytest.mark.parametrize("spec", ["qsgd(range='norm')", "nuqsgd"])
def test_squares_that_float32_cannot_hold_do_no_harm(spec, scale):
    x = torch.from_numpy(entries()).mul_(scale)
    decoded = tw.Simulation(spec, workers=1).reduce([x])
    assert torch.isfinite(decoded).all() and decoded.abs().max() > 0


@pytest.mark.parametrize("spec", ["qsgd(range='norm')", "nuqsgd"])
def test_one_entry_alone_is_exact(spec):
    x = torch.zeros(3000)
    x[1234] = -0.3
    torch.testing.assert_close(tw.Simulation(spec, workers=2).reduce([x, x]), x)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("qsgd(range='mean')", "got 'mean'"),
        ("qsgd(bits=1, range='norm')", "bits must be 2..8, got 1"),
        ("nuqsgd(bits=8)", "bits must be 2..7, got 8"),
        ("nuqsgd(range='mean')", "got 'mean'"),
        ("nuqsgd(group=5)", "group must be"),
    ],
)
def test_mistakes_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        tw.scheme(spec)
