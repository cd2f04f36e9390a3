"""TopKC: the group's chunks, no index on the wire, and what locality is worth."""

import pytest
import torch

import thinwire as tw
from thinwire.bucket import Bucket, Layout
from thinwire.memory import Memory
from thinwire.requests import Sum


def gradients(seed, *, size=1 << 16, workers=4, permuted=False):
    """Scales that change smoothly over neighbours and, within them, entries of very different size."""
    generator = torch.Generator().manual_seed(seed)
    knots = 2 * torch.randn(size // 256 + 1, generator=generator)
    place = torch.arange(size) / 256
    left, share = place.long(), place - place.floor()
    scale = torch.exp(knots[left] * (1 - share) + knots[left + 1] * share)
    common = torch.randn(size, generator=generator) * torch.exp(0.8 * torch.randn(size, generator=generator))
    tensors = [scale * (common + 0.5 * torch.randn(size, generator=generator)) for _ in range(workers)]
    order = torch.randperm(size, generator=generator)
    return [tensor[order] for tensor in tensors] if permuted else tensors


def vnmse(spec, tensors):
    exact = sum(tensors) / len(tensors)
    simulation = tw.Simulation(spec, workers=len(tensors), feedback=False)
    error = (simulation.reduce(tensors) - exact).square().sum() / exact.square().sum()
    return float(error), simulation


@pytest.mark.parametrize("bits, topk_is_better", [(0.5, True), (2, True), (8, False)])
def test_against_topk_at_equal_bits(bits, topk_is_better):
    """Top-k pays 16 + 32 bits per entry here, as in the comparison reproduced; ours codes places in fewer."""
    chunk, size = 64, 1 << 16
    topkc = f"topkc(density={bits / 16 - 1 / chunk}, chunk={chunk})"
    error, simulation = vnmse(topkc, gradients(0))
    topk, _ = vnmse(f"topk(density={bits / 48})", gradients(0))
    shuffled, _ = vnmse(topkc, gradients(0, permuted=True))
    assert (topk < error) is topk_is_better
    assert shuffled > 2 * max(error, topk)
    # Counted bytes are the formula's: 16 (J C / d + 1 / C) bits per entry, times what an all-reduce sends.
    chunks = round((bits / 16 - 1 / chunk) * size / chunk)
    expected = 16 * (chunks * chunk / size + 1 / chunk)
    assert expected == bits
    assert simulation.bytes_sent * 8 / size == pytest.approx(2 * 3 / 4 * bits)


def test_workers_choose_alike_from_the_sum_alone():
    """Two workers with different gradients, same answer: the same places, whatever is their own."""
    layout, answers = Layout.of([("x", (1000,))]), []
    norms = torch.rand(16).to(torch.bfloat16)
    for worker in range(2):
        bucket = Bucket(torch.randn(1000), layout, workers=2, worker=worker)
        before = bucket.flat.clone()
        talk = tw.parse("topkc(density=0.25, values='fp32')").converse(bucket, Memory(), 0.25)
        first = next(talk)
        assert isinstance(first, Sum) and first.tensor.numel() == 16
        second = talk.send(norms.clone())
        assert isinstance(second, Sum) and second.tensor.numel() == 4 * 64
        with pytest.raises(StopIteration) as stop:
            talk.send(torch.ones(256))
        answers.append(stop.value.value != 0)
        assert not torch.equal(before, bucket.flat)
    assert torch.equal(*answers)
    chosen = answers[0].nonzero().squeeze(1)
    expected = norms.float().topk(4).indices
    assert set((chosen // 64).tolist()) == set(expected.tolist())


def test_ties_go_to_the_first_chunks_and_the_short_last_chunk_works():
    kept = tw.Simulation("topkc(density=0.5, chunk=4)", workers=3).reduce([torch.ones(10)] * 3)
    assert kept.tolist() == [1] * 8 + [0] * 2
    last = torch.cat([torch.zeros(8), torch.tensor([3.0, 4.0])])
    assert torch.equal(tw.Simulation("topkc(density=0.1, chunk=4)", workers=3).reduce([last] * 3), last)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e15])
def test_sixteen_bits_are_enough_for_any_scale(scale):
    tensors = [scale * tensor for tensor in torch.randn(2, 640)]
    mean = tw.Simulation("topkc(density=1)", workers=2, feedback=False).reduce(tensors)
    error = (mean - sum(tensors) / 2).norm() / (sum(tensors) / 2).norm()
    assert error < 1e-3


def test_many_workers_still_see_which_chunk_is_largest():
    """300 equal norms in bfloat16 would stop adding up at 256 times one of them."""
    tensors = [torch.cat([torch.full((4,), 1.0), torch.full((4,), 1.05)]) for _ in range(300)]
    assert tw.Simulation("topkc(density=0.5, chunk=4)", workers=300).reduce(tensors)[:4].any().logical_not()
