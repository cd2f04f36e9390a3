"""Codecs as text, so that a server can decode what it is sent; and plain floats as a codec, for the way back."""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec, Scheme
from thinwire.schemes import parse


@dataclass(frozen=True)
class Floats(Codec):
    """Every entry as a float of the given dtype: "float32", "float16" or "bfloat16"."""

    dtype: str = "float32"

    unbiased: ClassVar[bool] = False  # rounding to the nearest; the error memory makes up for it
    any_float: ClassVar[bool] = True
    grain: ClassVar[int | None] = 8
    summary: ClassVar[str] = "the entries themselves"

    def nbytes(self, layout: Layout, level: float) -> int:
        return layout.numel * self._dtype.itemsize

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        values = out.view(self._dtype)
        values.copy_(bucket.flat)
        if bucket.lost is not None:
            torch.sub(bucket.flat, values.to(bucket.flat.dtype), out=bucket.lost)

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        if data.numel() != self.nbytes(layout, level):
            raise ValueError(f"{layout.numel} {self.dtype} entries have another size than {data.numel()} bytes")
        out.add_(data.view(self._dtype), alpha=weight)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


CASTS = {"fp32": Floats("float32"), "fp16": Floats("float16"), "bf16": Floats("bfloat16")}


def codec_of(scheme: str | Scheme) -> Codec:
    """The codec that a spec names; the casts are `Floats`. Raises for schemes that need a conversation."""
    parsed = parse(scheme)
    if parsed.name in CASTS:
        return CASTS[parsed.name]
    if not isinstance(parsed, Codec):
        codecs = "fp32, fp16, bf16, and schemes that are one message, such as qsgd"
        raise ValueError(f"{parsed.name} is a conversation of the whole group, not one message; accepted: {codecs}")
    return parsed


def bound(codec: Codec) -> bool:
    """Whether the codec holds tensors of the worker that made it, so that nobody else can encode with it."""
    return any(isinstance(getattr(codec, f.name), Tensor) for f in fields(codec))  # type: ignore[arg-type]


def describe(value: Any) -> Any:
    """A dataclass of plain values (and such dataclasses) as a literal. Tensors are left out: decoding cannot need
    them, since every receiver decodes everybody's payloads."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        return {
            "class": f"{kind.__module__}:{kind.__qualname__}",
            "fields": {f.name: describe(getattr(value, f.name)) for f in fields(value) if f.init},
        }
    if isinstance(value, Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is not None and not isinstance(value, bool | int | float | str | tuple):
        raise ValueError(f"a codec on a parameter server has plain options, got {value!r}")
    return value


def rebuild(literal: Any) -> Any:
    """What `describe` described. Raises ValueError for anything else."""
    if not isinstance(literal, dict):
        return literal
    if "tensor" in literal:
        return torch.empty(0, dtype=_dtype(literal["tensor"]))
    if "dtype" in literal:
        return _dtype(literal["dtype"])
    try:
        module, _, name = literal["class"].partition(":")
        kind: Any = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
        assert isinstance(kind, type) and is_dataclass(kind)
        return kind(**{name: rebuild(value) for name, value in literal["fields"].items()})
    except (ImportError, AttributeError, AssertionError, KeyError, TypeError) as error:
        raise ValueError(f"cannot make {literal.get('class')!r} here: {error}") from error


def literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"cannot read the description {text[:60]!r}") from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
