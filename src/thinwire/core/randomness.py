"""Counter-based randomness: every draw is a pure function of (seed, step, parameter, worker, element).

Nothing is drawn from a stream, so results do not depend on threads, buckets or history, and a resumed run
continues with the same bits. A `key` is 64 bits; the kernels hash it with an element's index in its tensor.
"""

import hashlib
from functools import lru_cache

import numpy as np
from torch import Tensor

_MASK = (1 << 64) - 1
SHARED = 0xFFFF_FFFF  # the `worker` of a draw that the whole group makes alike
RELAY = 0xFFFF_FFFE  # the `worker` of a draw made for a mean that is encoded again on its way back


def mix(value: int) -> int:
    """One round of splitmix64: a bijection on 64 bits without visible structure."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=65536)
def name_hash(name: str) -> int:
    """64 bits of a parameter's name, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def key(seed: int, step: int, name: str, worker: int = SHARED) -> int:
    """The key of one parameter's draws in one step on one worker."""
    return mix(name_hash(name) ^ mix(mix(mix(seed & _MASK) ^ step) ^ worker))


def keys(seed: int, step: int, name_hashes: np.ndarray, worker: int) -> np.ndarray:
    """`key` for many parameters at once; int64, as tensors hold no unsigned 64-bit integers."""
    value = name_hashes ^ np.uint64(mix(mix(mix(seed & _MASK) ^ step) ^ worker))
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (value ^ (value >> np.uint64(31))).view(np.int64)


def keys_on_device(seed: Tensor, step: int, name_hashes: Tensor, worker: int) -> Tensor:
    """`keys` of a seed that is on a device, there, as the hashes are (int64): nobody waits to know it."""
    return _mixed(name_hashes ^ _mixed(_mixed(_mixed(seed) ^ step) ^ worker))


def _mixed(value: Tensor) -> Tensor:
    """`mix` of every element: int64 wraps as unsigned integers do, but its shifts fill in the sign."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, by: int) -> Tensor:
    return (value >> by) & (_MASK >> by)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
