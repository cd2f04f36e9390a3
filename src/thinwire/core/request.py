"""What a conversation may ask of the group. Requests are mathematics; an exchange decides how they travel.

A tensor inside a request belongs to the exchange until the answer comes, and the answer may be the same memory.
Every worker asks the same sequence of requests, with tensors of the same shapes and dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from thinwire.core.bucket import Bucket
    from thinwire.core.scheme import Codec


@dataclass(frozen=True)
class Payload:
    """One encoded message: the bytes as they travel, and the codec and level that made them."""

    data: Tensor  # uint8, 1-d, contiguous
    codec: Codec
    level: float

    @property
    def nbytes(self) -> int:
        return self.data.numel()


@dataclass(frozen=True)
class Sum:
    """The sum over workers, element by element.

    With `width`, the tensor holds integers (int32) that travel in `width` bits, two's complement. The running sum
    is taken in rank order; `saturate` clips it to +-(2^(width-1) - 1) after every addition, else the
    scheme promises that no partial sum overflows `width` bits.
    """

    tensor: Tensor
    width: int | None = None
    saturate: bool = False


@dataclass(frozen=True)
class Max:
    """The maximum over workers, element by element."""

    tensor: Tensor


@dataclass(frozen=True)
class Mean:
    """The mean over workers of what `codec` makes of each worker's bucket: mean_i decode(encode(bucket_i)).

    The codec, not a finished payload, is what is asked for: an exchange that cuts the bucket into parts encodes
    each part by itself. The answer is a flat tensor over the bucket's layout.
    """

    codec: Codec
    bucket: Bucket
    level: float


Request: TypeAlias = Sum | Max | Mean
