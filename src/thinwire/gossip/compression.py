"""How a mixer compresses a replica with thinwire's codecs."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.bucket import Bucket
from thinwire.core.scheme import Codec
from thinwire.gossip.node import Node


def encoded(codec: Codec, values: Tensor, node: Node) -> Tensor:
    """The payload of `values`, laid out like the node's weights. Codecs work in float32."""
    bucket = Bucket(
        values.to(torch.float32), node.layout,
        worker=node.number, step=node.step, seed=node.seed, scratch=node.scratch,
    )  # fmt: skip
    return codec.payload(bucket, codec.level)


def decoded(codec: Codec, payload: Tensor, node: Node) -> Tensor:
    """What a payload says, in the weights' dtype. All who hear the same bytes get the same numbers."""
    values = torch.zeros(node.layout.numel, dtype=torch.float32, device=payload.device)
    codec.decode_add(payload, node.layout, codec.level, values, 1.0)
    return values.to(node.flat.dtype)
