"""Compiles every Triton kernel for cards that need not be there, and prints what each takes of them.

    python benchmarks/cubins.py                 # sm80, sm90, gfx942
    python benchmarks/cubins.py --target sm90 --only quantize

The operations are called on tensors without memory; what they would start is compiled instead. Triton keeps what it has
compiled (TRITON_CACHE_DIR), so a second run takes seconds.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinwire.kernels import backends
from thinwire.kernels.backends.triton import launch
from thinwire.kernels.warm import USUAL, Shapes, calls

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
NAMES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What a kernel is compiled from: the function, the types of its arguments, its constants."""

    operation: str
    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int

    def compiled(self, target: str) -> Any:
        numbers = {name: number for number, (name, _) in enumerate(self.types)}
        aligned = [name for name, type in self.types if type[0] == "*" and type not in ("*u8", "*i8")]
        source = ASTSource(
            fn=self.kernel, signature=dict(self.types),
            constexprs={(numbers[name],): value for name, value in self.constants},
            attrs={(numbers[name],): [["tt.divisibility", 16]] for name in aligned},
        )  # fmt: skip
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        return triton.compile(source, target=TARGETS[target], options=options)


@dataclass(frozen=True)
class Binary:
    """A compiled kernel, and what it takes: of a thread's registers and stack, of a program's shared memory."""

    launch: Launch
    target: str
    registers: int
    stack: int  # bytes: what did not fit into registers
    shared: int
    size: int
    assembly: str


@contextmanager
def watched(look: Callable[..., None]) -> Iterator[torch.device]:
    """Meanwhile operations on the device that is yielded, which has no memory, start nothing but `look`."""
    run, fast = launch.run, dict(backends.FAST)
    launch.run = look
    backends.FAST["meta"] = "triton"
    backends._found.cache_clear()
    try:
        yield torch.device("meta")
    finally:
        launch.run = run
        backends.FAST.clear()
        backends.FAST.update(fast)
        backends._found.cache_clear()


def launches(shapes: Shapes = USUAL, only: str = "") -> list[Launch]:
    """Every kernel, once for each set of types and constants that the operations ask for."""
    found: dict[Any, Launch] = {}
    operation = ""

    def look(kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any], warps: int) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        types = {name: _type(value) for name, value in given.items()} | dict.fromkeys(constants, "constexpr")
        fixed = {name: None for name, value in given.items() if value is None} | constants
        made = Launch(operation, kernel, tuple(types.items()), tuple(fixed.items()), warps)
        found.setdefault((kernel.fn, made.types, made.constants, warps), made)

    with watched(look) as device:
        for operation, call in calls(device, shapes).items():  # `look` reads it
            if (
                only in operation and operation != "all_finite"
            ):  # which waits for an answer; keep_finite_ has its kernel
                call()
    return list(found.values())


def _type(value: Any) -> str:
    if value is None:
        return "constexpr"
    return NAMES[value.dtype] if isinstance(value, Tensor) else "fp32" if isinstance(value, float) else "i32"


def compiled(each: Launch, target: str) -> Binary:
    made = each.compiled(target)
    if target.startswith("sm"):
        registers, stack = _used(made.asm["cubin"])
        return Binary(each, target, registers, stack, made.metadata.shared, len(made.asm["cubin"]), made.asm["ptx"])
    text = made.asm["amdgcn"]
    registers, stack = (_number(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "private_segment_fixed_size"))
    return Binary(each, target, registers, stack, made.metadata.shared, len(made.asm["hsaco"]), text)


def _used(cubin: bytes) -> tuple[int, int]:
    """Registers and stack, as the assembler noted them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _number(pattern: str, text: str) -> int:
    return max(map(int, re.findall(pattern, text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="all, unless some are named")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    print("| operation | kernel | " + " | ".join(f"{target}: registers, stack, shared" for target in targets) + " |")
    print("|---|---|" + "---|" * len(targets))
    began = time.perf_counter()
    for each in launches(only=options.only):
        binaries = [compiled(each, target) for target in targets]
        cells = [f"{one.registers}, {one.stack}, {one.shared}" for one in binaries]
        print(f"| {each.operation} | `{each.kernel.fn.__name__.strip('_')}` | {' | '.join(cells)} |", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
