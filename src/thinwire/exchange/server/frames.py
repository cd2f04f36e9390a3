"""The frames between a worker and a parameter server: fixed headers, checked field by field, then the bytes.

    worker -> server    Push (72 bytes), [an operation's description], [payload]
    server -> worker    Reply (256 bytes, with room for the reason of a refusal), [answer]

The receiver of an answer knows its size beforehand, so both receives are posted with the push, and the bytes need not
wait for a handshake. After a refusal no answer comes: whoever reads one leaves. A frame that does not fit raises
ValueError and nothing else is read.
"""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

MAGIC = b"TWPS"
VERSION = 1
LIMIT = 1 << 40  # bytes of one message: anything above is a corrupt header


class Kind(IntEnum):
    ASK = 1  # one request of a conversation; all workers ask the same
    STATE = 2  # make a snapshot; the reply says how long it is
    FETCH = 3  # send the snapshot
    LOAD = 4  # take a snapshot
    GRADIENT = 5  # asynchronous: a gradient up, weights down
    WEIGHTS = 6  # asynchronous: the first weights up (from one worker), weights down
    BYE = 7  # this worker has finished
    KNOCK = 8  # at the door: may this worker come in?
    ROLL = 9  # who is at the door? all workers ask it together
    GIVE = 10  # the job's state, for those at the door
    ADMIT = 11  # count on these, too, from now on
    TAKE = 12  # send the job's state, to one who was let in


class Verdict(IntEnum):
    FINE = 1
    REFUSED = 2


_PUSH = struct.Struct("<4sHHQQQdIIQQq")
_REPLY = struct.Struct("<4sHHQIIIQq")
PUSH_BYTES = _PUSH.size
REPLY_BYTES = 256
_ROOM = REPLY_BYTES - _REPLY.size - 2


@dataclass(frozen=True)
class Push:
    kind: Kind
    sequence: int = 0  # counts this worker's requests to this server
    operation: int = 0  # which operation the payload has; see `operations`
    step: int = 0
    level: float = 0.0
    workers: int = 0  # how many workers the conversation counts on
    text_bytes: int = 0  # the operation's description follows: this worker uses it for the first time
    nbytes: int = 0  # of the payload
    answer_bytes: int = 0  # what the worker is ready to receive
    checksum: int = 0

    def pack(self) -> Tensor:
        return _tensor(_PUSH.pack(MAGIC, VERSION, *astuple(self)))

    @classmethod
    def unpack(cls, frame: Tensor) -> Push:
        magic, version, kind, *rest = _PUSH.unpack(frame.numpy().tobytes())
        _check_magic(magic, version)
        if kind not in Kind._value2member_map_:
            raise ValueError(f"a push of unknown kind {kind}; known: 1..{len(Kind)}")
        push = cls(Kind(kind), *rest)
        if max(push.text_bytes, push.nbytes, push.answer_bytes) > LIMIT:
            raise ValueError(f"a push of {push.nbytes} bytes is above the limit of {LIMIT}")
        if not math.isfinite(push.level):
            raise ValueError(f"a push at level {push.level} is corrupt")
        return push


@dataclass(frozen=True)
class Reply:
    verdict: Verdict
    sequence: int = 0
    answered: int = 0  # how many workers' payloads are in the answer
    alive: int = 0  # how many workers the server still counts on
    place: int = 0  # of this worker among them
    nbytes: int = 0
    checksum: int = 0
    reason: str = ""  # why a push was refused; cut to fit

    def pack(self) -> Tensor:
        *numbers, reason = astuple(self)
        text = reason.encode()[:_ROOM]
        head = _REPLY.pack(MAGIC, VERSION, *numbers) + struct.pack("<H", len(text)) + text
        return _tensor(head.ljust(REPLY_BYTES, b"\0"))

    @classmethod
    def unpack(cls, frame: Tensor) -> Reply:
        raw = frame.numpy().tobytes()
        magic, version, verdict, *rest = _REPLY.unpack_from(raw)
        _check_magic(magic, version)
        (length,) = struct.unpack_from("<H", raw, _REPLY.size)
        if verdict not in Verdict._value2member_map_ or length > _ROOM:
            raise ValueError(f"a reply with verdict {verdict} and a reason of {length} bytes is corrupt")
        start = _REPLY.size + 2
        text = raw[start : start + length].decode(errors="replace")
        return cls(Verdict(verdict), *rest, text)  # type: ignore[call-arg]


def checksum(data: Tensor) -> int:
    """The sum of the 8-byte words (and of the bytes left over), 63 bits. Runs at the speed of memory.

    It finds a flipped bit or a lost segment, not a permutation of words; TCP guards the order.
    """
    array = data.numpy()
    whole = array.size & ~7
    total = int(array[:whole].view(np.uint64).sum(dtype=np.uint64)) + int(array[whole:].sum(dtype=np.uint64))
    return total & ((1 << 63) - 1)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's own memory as uint8."""
    return tensor.view(-1).view(torch.uint8)


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _check_magic(magic: bytes, version: int) -> None:
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"not a thinwire frame of version {VERSION}: it begins {magic!r}, version {version}")
