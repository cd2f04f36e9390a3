"""What a conversation may ask of the group. Requests are mathematics; an exchange decides how they travel.

A tensor inside a request belongs to the exchange until the answer comes, and the answer may be the same memory.
Every worker asks the same sequence of requests, with tensors of the same shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from thinwire.core.bucket import Bucket
    from thinwire.core.scheme import Codec

Encode: TypeAlias = "Callable[[Bucket, float, Tensor], None]"  # as Codec.encode


@dataclass(frozen=True)
class Sum:
    """The sum over workers, element by element.

    With `width`, the tensor holds integers (int8, int16 or int32, which hold as many bits) that travel in `width` bits,
    two's complement. The running sum
    is taken in rank order; `saturate` clips it to +-(2^(width-1) - 1) after every addition, else the
    scheme promises that no partial sum overflows `width` bits.
    """

    tensor: Tensor
    width: int | None = None
    saturate: bool = False


# A float of p significant bits no longer grows after 2^p equal terms; a fourth of that it still adds up well enough.
_MOST_TERMS = {torch.bfloat16: 64, torch.float16: 512}


def holds_sum(dtype: torch.dtype, workers: int) -> bool:
    """Whether a Sum over so many workers may be taken in `dtype`; beyond, narrow floats swallow what is added last."""
    return workers <= _MOST_TERMS.get(dtype, workers)


@dataclass(frozen=True)
class Max:
    """The maximum over workers, element by element."""

    tensor: Tensor


@dataclass(frozen=True)
class Mean:
    """The mean over workers of what `codec` makes of each worker's bucket: mean_i decode(encode(bucket_i)).

    The codec, not a finished payload, is what is asked for: an exchange that cuts the bucket into parts encodes
    each part by itself, in the bucket's scratch. The answer is a flat tensor over the bucket's layout.

    encode: this worker's own way to make a payload, in the place of `codec.encode`. Decoding is everybody's.
    exact: the answer must be that mean itself: nobody may encode it once more on its way back.
    """

    codec: Codec
    bucket: Bucket
    level: float
    encode: Encode | None = None
    exact: bool = False


# A tuple asks several things at once; all are under way together, and the answer is the tuple of their answers.
Request: TypeAlias = "Sum | Max | Mean | tuple[Request, ...]"
Answer: TypeAlias = "Tensor | tuple[Answer, ...]"
