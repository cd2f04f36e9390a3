"""Those who have a CUDA device: `make test-gpu`. The kernels there make the references' bits, and each can be timed."""

import os

import pytest
import torch
from blocks_data import same_bits
from cases_data import CASES, COMPOSED, WITHOUT_TRITON, elsewhere

from thinwire import kernels
from thinwire.kernels import Levels, Shapes, reference
from thinwire.kernels.backends import fast
from thinwire.kernels.warm import calls
from thinwire.lab.bench import device as bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="no CUDA device"
    ),
]
N, CUDA = 1_000_003, torch.device("cuda")
STARTS, KEYS, COUNTERS = torch.tensor([0, 7, 7, 300_000, N]), torch.tensor([5, -7, 9, 11]), torch.tensor([0, 9, 1, 2])


def x(seed=0):
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def both(work):
    """What a function of a module and a device makes: by the reference in CPU memory, by the face on the card."""
    torch.cuda.synchronize()
    expected, found = work(reference, torch.device("cpu")), work(kernels, CUDA)
    for a, b in zip(expected, found, strict=True):
        assert b.device.type == "cuda"
        b = b.cpu()
        assert same_bits(a, b) if a.dtype is torch.float32 else torch.equal(a, b)


def test_the_card_is_served_by_triton():
    backend, why = fast("cuda")
    assert backend is not None, why


@pytest.mark.parametrize("name", sorted(set(CASES) - WITHOUT_TRITON))
def test_one_call_of_each_operation(name):
    """By the face, on the card, against the reference in CPU memory."""
    expected = CASES[name](getattr(reference, name, getattr(kernels, name)))
    found = CASES[name](elsewhere(getattr(kernels, name), CUDA))
    if name in COMPOSED | {"block_statistics"}:  # sums agree within one unit in the last place
        assert torch.allclose(found, expected, rtol=2e-7, atol=0)
    else:
        assert found.dtype is expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("block", [0, 64, 1000, 1024, 70_000])
def test_statistics(block):
    count = kernels.check.blocks(STARTS, block).count
    made = []
    for module, device in ((reference, torch.device("cpu")), (kernels, CUDA)):
        outs = {name: torch.zeros(count, device=device) for name in ("absmean", "absmax", "square")}
        module.block_statistics(x().to(device), STARTS, block, **outs)
        made.append({name: out.cpu() for name, out in outs.items()})
    assert torch.equal(made[0]["absmax"], made[1]["absmax"])
    for name in ("absmean", "square"):
        assert int((made[0][name].view(torch.int32) - made[1][name].view(torch.int32)).abs().max()) <= 1


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("name", ["uniform", "levels"])
def test_quantisers(name, bits):
    how = bits if name == "uniform" else Levels(torch.linspace(-3, 3, 1 << bits))

    def work(module, device):
        ranges = torch.full((kernels.check.blocks(STARTS, 1024).count,), 2.5, device=device)
        codes = torch.zeros(kernels.packed_bytes(STARTS, 1024, bits), dtype=torch.uint8, device=device)
        lost, total = torch.zeros(N, device=device), x(1).to(device)
        draws = {"keys": KEYS, "counters": COUNTERS}
        encode, add = getattr(module, f"quantize_{name}"), getattr(module, f"dequantize_{name}_add")
        encode(x().to(device), STARTS, 1024, how, ranges, **draws, out=codes, lost=lost)
        add(codes, STARTS, 1024, how, ranges, 0.3, out=total)
        return codes, lost, total

    both(work)


@pytest.mark.parametrize("block", [64, 1024, 4096, 8192, 1 << 30])
def test_rotations(block):
    levels = Levels(torch.linspace(-2, 2, 4))

    def work(module, device):
        padded, count = kernels.padded_numel(STARTS, block), kernels.check.blocks(STARTS, block).count
        y, integers = x().to(device), torch.zeros(padded, dtype=torch.int8, device=device)
        lost, said, mean = (torch.zeros(N, device=device) for _ in range(3))
        codes, scale = torch.zeros(padded // 4, dtype=torch.uint8, device=device), torch.zeros(count, device=device)
        step, how = torch.full((count,), 0.3, device=device), {"signs": KEYS, "counters": COUNTERS}
        module.rotate_round(y, STARTS, block, step, 0.5, -8, 7, **how, keys=KEYS, out=integers, lost=lost)
        module.unrotate_sum(integers, STARTS, block, step, 0.5, **how, out=mean)
        module.rotate_quantize(y, STARTS, block, levels, **how, scale=scale, out=codes, lost=said)
        module.hadamard_(y, STARTS, block, keys=KEYS, counters=COUNTERS)
        return integers, lost, mean, codes, scale, said, y

    both(work)


def test_places():
    few = torch.tensor([0, 3, 3, 4003, 10_000])

    def work(module, device):
        out = torch.zeros(10_000, dtype=torch.int32, device=device)
        module.draw_places(STARTS, few, KEYS, out)
        return (out,)

    both(work)


def test_selections_moves_and_indices():
    def work(module, device):
        y = x().to(device)
        places = module.top_k(y, 10_000)
        values = module.take_(y, places)
        data = module.encode_indices(places, N)
        module.scatter_add(values, module.decode_indices(data, 10_000, N), 1 / 3, y)
        return places, values, data, y

    both(work)


def test_integers_casts_and_products():
    def work(module, device):
        ints = (torch.arange(N, device=device) % 13 - 6).to(torch.int32)
        data = torch.zeros(kernels.packed_int_bytes(N, 11), dtype=torch.uint8, device=device)
        module.pack_ints(ints, 11, data)
        module.add_packed_saturating(data, 11, ints)
        y = x().to(device)
        module.widen(module.narrow(y, 1 / 3, torch.bfloat16), y)
        matrix, basis = x(1).to(device)[:1_000_000].view(1000, 1000), x(2).to(device)[:4000].view(4, 1000)
        left, right = torch.zeros(4, 1000, device=device), torch.zeros(4, 1000, device=device)
        module.times_rows(matrix, basis, left)
        module.times_columns(matrix, basis, right)
        return data, ints, y, left, right

    both(work)


def test_no_operation_waits():
    """PyTorch itself raises where the host would wait for the device."""
    prepared = calls(CUDA, Shapes())
    del prepared["all_finite"]
    for call in prepared.values():
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in prepared.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_operation_can_be_timed():
    rows = bench.benchmark(CUDA, numel=100_000, repeats=2)
    assert len(rows) == len(calls(torch.device("cpu"))) and all(row.milliseconds > 0 for row in rows)
