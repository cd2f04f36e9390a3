"""The Triton kernels without a card: they compile for cards of three kinds, nothing is fused, nothing waits, and what
an operation takes of fresh memory is less than the message."""

import importlib
import inspect
import re
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire import kernels
from thinwire.kernels import Shapes, backends
from thinwire.kernels.warm import calls

pytest.importorskip("triton")

from benchmarks import cubins
from thinwire.kernels.backends import triton as backend
from thinwire.kernels.backends.triton import launch, places

INEXACT = ("fma.", ".ftz", "div.full", "approx", "mul.f32", "add.f32", "sub.f32")  # without .rn they may be fused
HOT = (
    "_quantize",
    "_dequantize",
    "_statistics",
    "_cast_add",
    "_scale_cast",
    "_rotate_round",
    "_unrotate_sum",
    "_pass",
    "_fill",
    "_round",
    "_unround",
    "_uncode",
    "_give",
    "_count",
)


FUSED = re.compile(r"^\s+v_(?:pk_)?(?:fma|fmac|mac|mad)(?!\w*_[ui]\d)\w* .*$", re.MULTILINE)
INTEGER = ("0x4f800000", "0xcf800000")  # 2^32: of a division of integers


def check_amd(assembly, name):
    """What is fused belongs to a division (5 each) or a root (2), to round it right, or adds -0: a product."""
    fused = [line for line in FUSED.findall(assembly) if "neg(0)" not in line and not any(n in line for n in INTEGER)]
    assert len(fused) == 5 * assembly.count("v_div_fixup_f") + 2 * assembly.count("v_sqrt_f32"), (name, fused)
    assert re.findall(r"amdhsa_float_(?:round|denorm)_mode_32 (\d)", assembly) == ["0", "3"], "to even; all denormals"


def test_a_fused_multiply_add_is_seen():
    modes = ".amdhsa_float_round_mode_32 0\n.amdhsa_float_denorm_mode_32 3\n"
    check_amd(f"{modes}\tv_fma_mix_f32 v5, v5, s4, neg(0)\n\tv_mad_u64_u32 v1, v2, v3, v4\n", "a product")
    for line in (
        "v_fma_f32 v1, v2, v3, v4",
        "v_fmac_f32_e32 v1, v2, v3",
        "v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]",
    ):
        with pytest.raises(AssertionError):
            check_amd(f"{modes}\t{line}\n", "fused")


def check_exact(binary):
    """A card's own arithmetic is to round as numpy's, which the interpreter computes with."""
    name = binary.launch.kernel.fn.__name__
    assert binary.size > 0 and binary.shared <= 48 << 10, name
    if binary.target.startswith("sm"):
        assert not [what for what in INEXACT if what in binary.assembly], name
    else:
        check_amd(binary.assembly, name)
    assert binary.stack == 0 or name not in HOT, (name, binary.stack)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", cubins.TARGETS)
def test_every_kernel_compiles_for_a_card(target):
    """Once each: 13 seconds of a core for each kind of card. Triton keeps them on disk, so only in the first run."""
    once = {each.kernel.fn: each for each in cubins.launches(Shapes(rotated=64, numel=500))}
    for each in once.values():
        check_exact(cubins.compiled(each, target))
    assert len(once) > 30


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", cubins.TARGETS)
def test_every_kernel_that_a_call_starts_compiles(target):
    for shapes in (Shapes(), Shapes(block=0, bits=1, width=11, rotated=4096), Shapes(block=100, bits=7, rotated=64)):
        for each in cubins.launches(shapes):
            check_exact(cubins.compiled(each, target))
    passes = cubins.launches(Shapes(rotated=1 << 20, numel=1 << 20), only="hadamard_")
    assert len({dict(each.constants)["STRIDE"] for each in passes}) == 3  # of which the others above have two
    for each in passes:
        check_exact(cubins.compiled(each, target))


class PretendedCard:
    """What Triton asks of a driver before it starts a kernel."""

    def get_current_target(self):
        return cubins.TARGETS["sm90"]

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_arguments_are_bound_as_a_launch_binds_them(monkeypatch):
    """Up to the launch itself: numbers that are 1 or divide by 16, pointers at any address, nothing where None is."""
    driver = importlib.import_module("triton.runtime.driver").driver
    monkeypatch.setattr(driver, "_active", PretendedCard())
    monkeypatch.setitem(backends.FAST, "cpu", "triton")
    backends._found.cache_clear()
    made = []

    def bind(kernel, programs, arguments, constants, warps):
        options = {"grid": (programs,), "num_warps": warps, "enable_fp_fusion": False}
        made.append(kernel.warmup(*arguments, **constants, **options))

    monkeypatch.setattr(launch, "run", bind)
    try:
        for numel in (496, 501):
            for call in calls(torch.device("cpu"), Shapes(rotated=64, numel=numel)).values():
                call()
    finally:
        monkeypatch.undo()
        backends._found.cache_clear()
    assert len(made) > 100 and None not in made


def test_every_kernel_and_every_operation_is_among_them():
    """A kernel is what starts with a number of its program; all else is called by one."""
    modules = [module for name, module in sys.modules.items() if name.startswith("thinwire.kernels.backends.triton.")]
    functions = {value for module in modules for value in vars(module).values() if hasattr(value, "arg_names")}
    starts = {each.fn for each in functions if "program_id" in inspect.getsource(each.fn)}
    helpers = {"_spots", "_rows", "_tile"}
    missing = starts - {each.kernel.fn for each in cubins.launches()}
    assert {each.__name__ for each in missing} <= helpers
    called = {name.split(",")[0] for name in calls(torch.device("cpu"))}
    assert called == set(backend.__all__) - {"takes"}


# What an operation may take of fresh memory, in bytes per entry: a message's size, for the thinnest message it is for.
MESSAGE = {"narrow": 2, "widen": 2, "random_u32": 8} | dict.fromkeys(
    ("top_k", "gather", "take_", "put_", "scatter_add", "encode_indices", "decode_indices"), 0.05
)
LEAST = 1 / 8  # one bit per entry


class Fresh(TorchDispatchMode):
    """Adds up the memory of tensors that are made on the device, and what comes there from CPU memory."""

    def __init__(self):
        super().__init__()
        self.nbytes, self.copied, self.known = 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in self._tensors((args, kwargs))}
        for each in self._tensors(made):
            storage = each.untyped_storage()
            if storage._cdata not in given and each.device.type == "meta":
                self.nbytes += storage.nbytes()
                self.known.append(storage)
                if any(one.device.type == "cpu" for one in self._tensors((args, kwargs))):
                    self.copied += storage.nbytes()
        return made

    def _tensors(self, values):
        return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("name", sorted(set(calls(torch.device("cpu"))) - {"all_finite"}))
def test_nothing_waits_and_fresh_memory_is_less_than_a_message(name):
    """On tensors without memory: to look at a number of one is an error. Tables are kept, so they count once."""
    numel = 4_000_000
    with cubins.watched(lambda *launch: None) as device:
        call = calls(device, Shapes(numel=numel, rotated=4096))[name]
        call()
        with Fresh() as fresh:
            call()
    own = 4 * numel if name.startswith("narrow") else 0  # a copy that the call itself makes for `narrow` to cut
    own += 4 * numel // 100 if name.startswith("top_k") else 0
    statistics = name.startswith("block_statistics")
    own += 4 * 3 * kernels.check.blocks(torch.tensor([0, numel]), 64).count if statistics else 0  # its results
    assert fresh.copied <= 2 * 8, "nothing but a key or two of the one tensor that there is"
    assert fresh.nbytes - own <= MESSAGE.get(name.split(",")[0], LEAST) * numel


def test_tables_of_a_large_model_are_kept():
    """One that is made makes the host wait: 160 buckets in 8 workers' parts, of which most hold other tensors."""
    layouts = [torch.tensor([0, 1000 + number, 9000]) for number in range(160 * 8 * 3)]
    for _ in range(2):
        before = places._places.cache_info().misses
        for starts in layouts:
            places.places(starts, 64, torch.device("cpu"), width=64, rows=1)
    assert places._places.cache_info().misses == before


def test_looking_at_an_answer_waits():
    with cubins.watched(lambda *launch: None) as device, pytest.raises(RuntimeError, match="meta"):
        kernels.all_finite(torch.ones(3, device=device))


def test_sums_on_a_device_are_never_sure_to_be_finite():
    with cubins.watched(lambda *launch: None) as device:
        for name in ("dequantize_uniform_sum", "dequantize_levels_sum"):
            assert calls(device)[name]() is False


def test_float64_runs_on_the_reference_and_halves_only_move():
    double, half = torch.float64, torch.bfloat16
    assert backend.takes("gather", (half,)) and backend.takes("cast_add", (half, torch.float32))
    assert not backend.takes("quantize_uniform", (double, double)) and not backend.takes("top_k", (half,))
    device = torch.device("cuda")
    assert backends.implementation(kernels.reference.top_k, device, torch.float32) is backend.top_k
    assert backends.implementation(kernels.reference.top_k, device, double) is kernels.reference.top_k


def test_warming_up_calls_what_is_named(monkeypatch):
    started = []
    with cubins.watched(lambda kernel, *rest: started.append(kernel.fn.__name__)) as device:
        kernels.warm_up(device, operations=["quantize_uniform", "top_k"])
    assert {"_quantize", "_count", "_write"} <= set(started) and "_gather" not in started
    monkeypatch.setattr("thinwire.kernels.warm.calls", None)
    kernels.warm_up(torch.device("cpu"))  # nothing to compile, so nothing is called
