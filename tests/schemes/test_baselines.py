"""EDEN, TernGrad, signSGD and natural compression: what the laws do not say."""

import math

import pytest
import torch

import thinwire as tw
from thinwire.core.bucket import Bucket
from thinwire.schemes import parse


def said(spec, x, step=0):
    codec = parse(spec)
    bucket = Bucket(x.clone(), Bucket.of(x).layout, step=step)
    out = torch.zeros_like(x)
    codec.decode_add(codec.payload(bucket, codec.level).data, bucket.layout, codec.level, out, 1.0)
    return out


def gaussian(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# The distortion of N(0, 1) under its Lloyd-Max levels, D; scaled to be unbiased it becomes 1/(1 - D) - 1.
@pytest.mark.parametrize(("bits", "distortion"), [(1, 1 - 2 / math.pi), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
@pytest.mark.parametrize("rotate", [10, 30])
def test_eden_error_is_that_of_gaussian_levels(bits, distortion, rotate):
    x = gaussian(32768)
    error = float((said(f"eden(bits={bits}, rotate={rotate})", x) - x).norm() ** 2 / x.norm() ** 2)
    assert error == pytest.approx(1 / (1 - distortion) - 1, rel=0.05)


def test_eden_is_no_worse_on_hard_gradients():
    x = gaussian(4096)
    spiky = x.sign() * x.abs() ** 6
    for bits in (1, 2, 4):
        flat, hard = (float((said(f"eden(bits={bits})", v) - v).norm() ** 2 / v.norm() ** 2) for v in (x, spiky))
        assert hard < 1.15 * flat
    one = torch.zeros(3000)
    one[2999] = 4.0
    torch.testing.assert_close(said("eden", one), one, rtol=1e-4, atol=1e-4)


def test_eden_workers_rotate_by_themselves():
    """Equal gradients: independent errors average out, so n workers have an n-th of the error."""
    x = gaussian(8192)

    def error(workers):
        mean = tw.Simulation("eden", workers=workers, route="gather").reduce([x] * workers)
        return float((mean - x).norm() ** 2)

    assert error(8) == pytest.approx(error(1) / 8, rel=0.1)


def test_eden_payload_is_bits_scales_and_a_key():
    codec = parse("eden(bits=2)")
    assert codec.nbytes(Bucket.of(torch.zeros(4096)).layout, 2) == 8 + 4 * 4 + 4096 * 2 // 8
    assert codec.nbytes(Bucket.of(torch.zeros(1)).layout, 2) == 8 + 4 + 64 * 2 // 8


def test_terngrad_has_three_levels():
    x = gaussian(5000)
    largest = float(x.abs().max())
    values = said("terngrad", x).unique()
    assert values.numpy() == pytest.approx([-largest, 0.0, largest])
    clipped = said("terngrad(clip=2.5)", x).abs().max()
    assert float(clipped) == pytest.approx(2.5 * float(x.square().mean().sqrt()), rel=1e-5)
    assert parse("terngrad").unbiased and not parse("terngrad(clip=2.5)").unbiased


def test_signsgd_is_sign_and_norm():
    x = gaussian(999)
    torch.testing.assert_close(said("signsgd", x), x.sign() * x.abs().mean())
    assert parse("signsgd").nbytes(Bucket.of(x).layout, 0) == 4 + 125


def test_natural_says_powers_of_two():
    x = gaussian(5000) * 3
    x = x[x.abs() > 2**-14 * 2 * x.abs().max()]  # smaller ones may become 0
    y = said("natural", x)
    exponents = y.abs().log2()
    assert torch.equal(exponents, exponents.round())
    assert bool(((y.abs() <= 2 * x.abs()) & (y.abs() >= x.abs() / 2)).all())
    assert torch.equal(said("natural", y), y)
    assert float((y - x).norm() ** 2 / x.norm() ** 2) <= 1 / 8


@pytest.mark.parametrize(("spec", "message"), [
    ("eden(bits=5)", r"bits must be 1\.\.4, got 5"),
    ("eden(rotate=31)", r"rotate must be 6\.\.30 stages, got 31"),
    ("terngrad(clip=-1)", "clip must be 0"),
    ("natural(bits=8)", r"bits must be 2\.\.5, got 8"),
])  # fmt: skip
def test_mistakes_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)
