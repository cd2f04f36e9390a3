"""Top-k: exactly k, the right ones, in few bits."""

import math

import pytest
import torch

import thinwire as tw
from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.schemes import parse


def reduce(spec, *tensors, feedback=False):
    return tw.Simulation(spec, workers=len(tensors), feedback=feedback).reduce(list(tensors))


@pytest.mark.parametrize("density, count", [(1e-9, 1), (0.001, 1), (0.0125, 12), (0.5, 500), (0.999, 999), (1, 1000)])
def test_keeps_exactly_k_of_the_largest(density, count):
    x = torch.randn(1000)
    kept = reduce(f"topk(density={density}, values='fp32')", x)
    assert kept.count_nonzero() == count
    assert torch.equal(kept[kept != 0], x[kept != 0])
    assert x[kept != 0].abs().min() >= x[kept == 0].abs().max() if count < 1000 else torch.equal(kept, x)


def test_of_equals_the_first_are_kept():
    kept = reduce("topk(density=0.3)", torch.tensor([1.0, -1.0] * 5))
    assert kept.tolist() == [1, -1, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("density", [1e-9, 0.3, 1])
@pytest.mark.parametrize("values", ["bf16", "fp16", "fp32", "fp64", "qsgd(bits=4)"])
def test_zero_gradients_come_back_as_zero(density, values):
    assert not reduce(f"topk(density={density}, values='{values}')", *torch.zeros(2, 100)).any()


def test_the_mean_is_of_what_each_worker_kept():
    a, b = torch.tensor([4.0, 1.0, 0.0, -8.0]), torch.tensor([0.0, 3.0, 2.0, -8.0])
    assert reduce("topk(density=0.5)", a, b).tolist() == [2.0, 1.5, 0.0, -8.0]


def test_the_mean_may_be_over_those_who_sent_an_element():
    a, b = torch.tensor([4.0, 1.0, 0.0, -8.0]), torch.tensor([0.0, 3.0, 2.0, -6.0])
    assert reduce("topk(density=0.5, mean='senders')", a, b).tolist() == [4.0, 3.0, 0.0, -7.0]
    with pytest.raises(ValueError, match="'workers' or 'senders'"):
        tw.scheme("topk(mean='all')")


@pytest.mark.parametrize("values, bytes_each", [("bf16", 2), ("fp16", 2), ("fp32", 4), ("fp64", 8)])
def test_size_is_values_plus_places(values, bytes_each):
    layout = Layout.of([("a", (300, 100)), ("b", (70,))])
    scheme = tw.scheme(f"topk(density=0.01, values='{values}')")
    assert scheme.nbytes(layout, 0.01) == 301 * bytes_each + kernels.index_bytes(301, 30070)


@pytest.mark.parametrize("density", [0.001, 0.01])
def test_places_cost_little_more_than_their_entropy(density):
    """Bits per kept entry, from real payloads, against log2(n choose k) / k."""
    n = 1_000_000
    scheme = tw.scheme(f"topk(density={density})")
    k = round(density * n)
    payload = scheme.payload(Bucket.of(torch.randn(n)), density)
    bits = 8 * (payload.nbytes - 2 * k) / k
    log2_choose = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    assert 1 <= bits / (log2_choose / k) < 1.07


@pytest.mark.parametrize("values, tolerance", [("bf16", 2**-8), ("fp16", 2**-11), ("qsgd(bits=8)", 2 / 255)])
def test_lost_is_all_that_the_message_does_not_say(values, tolerance):
    x = torch.randn(500)
    bucket = Bucket.of(x.clone())
    lost = torch.full_like(x, torch.nan)
    scheme = tw.scheme(f"topk(density=0.1, values='{values}')")
    data = torch.empty(scheme.nbytes(bucket.layout, 0.1), dtype=torch.uint8)
    scheme.encode(Bucket(bucket.flat, bucket.layout, lost=lost), 0.1, data)
    said = torch.zeros(500)
    scheme.decode_add(data, bucket.layout, 0.1, said, 1.0)
    torch.testing.assert_close(said + lost, x)
    kept = x.abs() >= x.abs().topk(50).values[-1]
    assert torch.equal(lost[~kept], x[~kept])
    assert 0 < lost[kept].abs().max() <= tolerance * x.abs().max()


def test_quantised_values_are_rounded_independently_in_different_buckets():
    scheme, layout = tw.scheme("topk(density=1, values='qsgd(bits=1)')"), {}
    for name in ("a", "b"):
        layout[name] = scheme.payload(Bucket.of(torch.linspace(-1, 1, 500), name), 1).data.clone()
    assert not torch.equal(layout["a"], layout["b"])


def test_damaged_messages_raise():
    scheme, layout = tw.scheme("topk(density=0.1)"), Layout.of([("x", (100,))])
    data = scheme.payload(Bucket.of(torch.randn(100)), 0.1).data
    out = torch.zeros(100)
    with pytest.raises(ValueError, match="10 of 100 elements"):
        scheme.decode_add(data[:-1], layout, 0.1, out, 1.0)
    damaged = data.clone()
    damaged[20:] = 255
    with pytest.raises(ValueError, match="damaged"):
        scheme.decode_add(damaged, layout, 0.1, out, 1.0)
    assert not out.any()


@pytest.mark.parametrize(
    "spec, message",
    [
        ("topk(density=0)", "density must be above 0"),
        ("topk(density=1.5)", "got 1.5"),
        ("topk(density='all')", "got 'all'"),
        ("topk(values='fp8')", "unknown scheme 'fp8'"),
        ("topk(values='topk')", "a quantiser's spec, got 'topk'"),
        ("topk(values='powersgd')", "a quantiser's spec"),
        ("randomk(values='powersgd')", "without memory"),
        ("topkc(chunk=0)", "chunk must be a positive integer, got 0"),
        ("topkc(density=-1)", "got -1"),
    ],
)
def test_mistakes_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        tw.scheme(spec)


def test_plain_places_are_32_bits_each_and_say_the_same():
    x = torch.randn(1000)
    coded, plain = (tw.Simulation(f"topk(density=0.1, places='{each}')", workers=2) for each in ("coded", "plain"))
    assert torch.equal(coded.reduce([x, -2 * x]), plain.reduce([x, -2 * x]))
    scheme, layout = parse("topk(density=0.1, places='plain')"), Layout.of([("x", (1000,))])
    assert scheme.nbytes(layout, 0.1) == 100 * (2 + 4)
    message = torch.empty(600, dtype=torch.uint8)
    scheme.encode(Bucket.of(x.clone()), 0.1, message)
    message[-1] = 127  # the last place is far beyond the bucket
    with pytest.raises(ValueError, match="below 1000"):
        scheme.decode_add(message, layout, 0.1, torch.zeros(1000), 1.0)
