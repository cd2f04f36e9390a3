"""Selecting elements, and moving selected elements in and out.

Indices are int32, and number chunks of `chunk` elements; with chunk = 1 an index is the place of an element. The last
chunk of a buffer may be short; among `values` every chunk takes `chunk` places, and what a short one leaves is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.backends.memory import or_empty
from thinwire.kernels.backends.reference.blocks import elements


def top_k(
    x: Tensor, k: int, weight: Tensor | None = None, *, starts: Tensor | None = None,
    out: Tensor | None = None, owed: Tensor | None = None, total: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """int32[k]: where the k largest |x| (|x * weight|) are, ascending; NaN above Inf, the first of equals.

    With `owed`, total = x + owed, and that is looked at. With `starts`, only at the stretches.
    """
    if starts is not None and starts.dim() == 2:
        return _top_k_with_gaps(x, k, weight, starts, or_empty(out, k, torch.int32, like=x), owed, total)
    if owed is not None:
        x = torch.add(x, owed, out=total)
    score = (x if weight is None else x * weight).abs()
    order = torch.sort(score, descending=True, stable=True).indices
    return or_empty(out, k, torch.int32, like=x).copy_(order[:k].sort().values)


def _top_k_with_gaps(
    x: Tensor, k: int, weight: Tensor | None, starts: Tensor, out: Tensor, owed: Tensor | None, total: Tensor | None
) -> Tensor:
    at = elements(starts).to(x.device)
    found = x[at]
    if owed is not None and total is not None:
        found = found + owed[at]
        total[at] = found
    places = top_k(found, k, None if weight is None else weight[at])
    return out.copy_(at[places.to(torch.int64)])


def check_indices(indices: Tensor, count: int) -> None:
    """Raises unless all indices are in 0..count - 1."""
    if indices.numel() == 0:
        return
    lowest, highest = (int(end) for end in indices.aminmax())
    if lowest < 0 or highest >= count:
        raise ValueError(f"indices must be in 0..{count - 1}, got {lowest}..{highest}")


def gather(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    """The chosen chunks of x, one after the other."""
    places, present = _places(x, indices, chunk)
    return _taken(x, places, present, or_empty(out, indices.numel() * chunk, x.dtype, like=x))


def scatter_add(values: Tensor, indices: Tensor, weight: float, out: Tensor, *, chunk: int = 1) -> None:
    """The chosen chunks of out += weight * values, in the order of the indices."""
    places, present = _places(out, indices, chunk)
    out.index_add_(0, places, _present(values, present) * weight)


def take_(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    """`gather`, then the chosen chunks of x are 0."""
    places, present = _places(x, indices, chunk)
    out = _taken(x, places, present, or_empty(out, indices.numel() * chunk, x.dtype, like=x))
    x.index_fill_(0, places, 0)
    return out


def put_(x: Tensor, indices: Tensor, values: Tensor, *, chunk: int = 1) -> None:
    """The chosen chunks of x = values. No index may repeat."""
    places, present = _places(x, indices, chunk)
    x.index_copy_(0, places, _present(values, present))


def _taken(x: Tensor, places: Tensor, present: Tensor | None, out: Tensor) -> Tensor:
    if present is None:
        return torch.index_select(x, 0, places, out=out)
    return out.zero_().index_copy_(0, present, x.index_select(0, places))


def _present(values: Tensor, present: Tensor | None) -> Tensor:
    return values if present is None else values.index_select(0, present)


def _places(x: Tensor, indices: Tensor, chunk: int) -> tuple[Tensor, Tensor | None]:
    """(where in x, where among the values) the elements of the chosen chunks are; None: all values have a place."""
    check_indices(indices, -(-x.numel() // chunk))
    places = indices.to(torch.int64)
    if chunk == 1:
        return places, None
    within = torch.arange(chunk, dtype=torch.int64, device=x.device)
    places = (places.unsqueeze(1) * chunk + within).reshape(-1)
    if x.numel() % chunk == 0:
        return places, None
    present = (places < x.numel()).nonzero().squeeze(1)
    return places.index_select(0, present), present
