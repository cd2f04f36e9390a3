"""Mutations: bytes, text and nested state that are nearly right, or not at all."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

import torch

INTEGERS = [
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    256,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 3e38, 1e300, float("inf"), float("-inf"), float("nan")]
WORDS = [
    "",
    "'",
    '"',
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    "=",
    ":",
    "null",
    "None",
    "True",
    "\0",
    "é",
    "1e999",
    "-",
    "0x10",
    "lambda: 0",
]


def changed_bytes(data: bytes, chance: random.Random, *, others: bytes = b"", same_length: bool = False) -> bytes:
    """One to three mutations of some bytes; `others` are spliced in. With `same_length` nothing is cut nor added."""
    kinds = [_flip, _field, _stretch, _splice] + ([] if same_length else [_cut, _grow, _noise])
    raw = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        chance.choice(kinds)(raw, chance, others)
    return bytes(raw[: len(data)]) if same_length else bytes(raw)


def _flip(raw: bytearray, chance: random.Random, _: bytes) -> None:
    for _ in range(chance.choice([1, 1, 2, 8]) if raw else 0):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)


def _field(raw: bytearray, chance: random.Random, _: bytes) -> None:
    """An extreme number where one may stand: at the front, the back, or a multiple of its size."""
    form = chance.choice("bhiqfd")
    size = struct.calcsize(form)
    if len(raw) < size:
        return
    at = chance.choice([0, len(raw) - size, size * chance.randrange(len(raw) // size)])
    if form in "fd":
        value = chance.choice(FLOATS)
        raw[at : at + size] = struct.pack(f"<{form}", value if form == "d" or abs(value) < 3.4e38 else float("inf"))
    else:
        raw[at : at + size] = (chance.choice(INTEGERS) % 256**size).to_bytes(size, "little")


def _stretch(raw: bytearray, chance: random.Random, _: bytes) -> None:
    if raw:
        start, stop = sorted(chance.randrange(len(raw) + 1) for _ in range(2))
        raw[start:stop] = chance.choice([b"\0", b"\xff", b"\x7f", chance.randbytes(1)]) * (stop - start)


def _splice(raw: bytearray, chance: random.Random, others: bytes) -> None:
    if raw and others:
        at = chance.randrange(len(raw))
        piece = others[chance.randrange(len(others)) :][: len(raw) - at]
        raw[at : at + len(piece)] = piece


def _cut(raw: bytearray, chance: random.Random, _: bytes) -> None:
    del raw[chance.randrange(len(raw) + 1) :]


def _grow(raw: bytearray, chance: random.Random, _: bytes) -> None:
    raw += chance.randbytes(chance.choice([1, 1, 3, 8, 64]))


def _noise(raw: bytearray, chance: random.Random, _: bytes) -> None:
    raw[:] = chance.randbytes(chance.choice([0, 1, len(raw), 2 * len(raw) + 1]))


def changed_text(text: str, chance: random.Random, others: list[str]) -> str:
    for _ in range(chance.choice([1, 1, 2, 3])):
        at = chance.randrange(len(text) + 1)
        kind = chance.randrange(7)
        if kind == 0:
            text = text[:at] + text[at + chance.choice([1, 1, 2, 9]) :]
        elif kind == 1:
            text = text[:at] + chance.choice(WORDS) + text[at:]
        elif kind == 2:
            text = text[:at] + chance.choice(others)[chance.randrange(9) :]
        elif kind == 3:
            digits = [i for i, letter in enumerate(text) if letter.isdigit()] or [at]
            place = chance.choice(digits)
            text = text[:place] + str(chance.choice(INTEGERS + FLOATS)) + text[place + 1 :]
        elif kind == 4:
            text = (
                text[:at]
                + chr(chance.choice([0, 9, 10, 0x2028, 0xFF, 0x1F600, chance.randrange(32, 127)]))
                + text[at + 1 :]
            )
        elif kind == 5:
            text = text[:at] + chance.choice(WORDS) * chance.choice([2, 50, 2000]) + text[at:]
        else:
            text = text[at:] + text[:at]
    return text


def changed_state(state: Any, chance: random.Random) -> Any:
    """A deep copy of nested dicts, lists and tensors with one to three odd places."""
    state = copy.deepcopy(state)
    for _ in range(chance.choice([1, 1, 2, 3])):
        holders = list(_holders(state))
        if not holders:
            return odd(chance)
        holder, key = chance.choice(holders)
        kind = chance.randrange(4)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[chance.choice([f"{key}x", "", 7, "worker0001"])] = holder.pop(key)
        elif isinstance(holder[key], torch.Tensor) and kind == 2:
            holder[key] = _odd_tensor(holder[key], chance)
        else:
            holder[key] = odd(chance)
    return state


def _holders(state: Any):
    """(dict or list, key) of every place in the state."""
    places = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in places:
        yield state, key
        yield from _holders(value)


def _odd_tensor(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    if tensor.is_sparse or tensor.is_meta:  # it is odd already
        return tensor
    return chance.choice(
        [
            lambda: tensor.double(),
            lambda: tensor.to(torch.int8),
            lambda: tensor.bool(),
            lambda: tensor.to(torch.complex64),
            lambda: tensor.reshape(-1),
            lambda: tensor.reshape(-1)[:-1],
            lambda: torch.cat([tensor.reshape(-1)] * 2),
            lambda: tensor.unsqueeze(0),
            lambda: tensor.to_sparse(),
            lambda: tensor.t() if tensor.dim() == 2 else tensor,
            lambda: torch.full_like(tensor, float("nan")),
            lambda: torch.empty(tensor.shape, device="meta"),
            lambda: tensor.expand(3, *tensor.shape),
        ]
    )()


def odd(chance: random.Random) -> Any:
    """What does not belong there."""
    things = [None, True, "", "x", "fp32", b"", [], {}, {"x": 1}, [1, "a"], torch.zeros(0), torch.ones(3), float, 1j]
    return chance.choice(chance.choice([INTEGERS, FLOATS, things]))
