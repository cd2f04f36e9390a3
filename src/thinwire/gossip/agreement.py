"""Before the first word: all ranks must have been given the same, and those that differ are named."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch.distributed as dist

from thinwire.exchange.objects import all_gather_objects

FIELDS = ("graph", "mixer", "seed", "on_failure", "model")
_DIGEST = 16
_REFUSED = bytes(_DIGEST)  # in the place of a digest: this rank's arguments made no sense to it


def agree(given: Mapping[str, bytes] | None, *, group: dist.ProcessGroup) -> None:
    """Compare what each rank was given, field by field; every rank raises ValueError alike if they differ.

    A rank that refused its arguments takes part with None, so that the others hear of it instead of waiting.
    """
    digests = [_REFUSED if given is None else _digest(given[field]) for field in FIELDS]
    everyone = all_gather_objects(digests, group)
    for number, field in enumerate(FIELDS):
        camps: dict[bytes, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            camps.setdefault(theirs[number], []).append(rank)
        if _REFUSED in camps:
            raise ValueError(f"ranks {camps[_REFUSED]} refused their arguments; see their own errors")
        if len(camps) > 1:
            against = " against ".join(f"ranks {ranks}" for ranks in camps.values())
            raise ValueError(f"the {field} differs between ranks: {against}")


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=_DIGEST).digest()
