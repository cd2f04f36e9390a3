"""Statistics of blocks in one pass. Meaning: `reference.blockstats`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference


def all_finite(x: Tensor) -> bool:
    """Whether x holds no Inf and no NaN."""
    return implementation(reference.all_finite, x.device, x.dtype)(x)


def at_hand(x: Tensor) -> bool:
    """Whether what x holds can be looked at here and now. A device would have to be waited for."""
    return x.device.type == "cpu"


def seen_nonfinite(x: Tensor) -> bool:
    """Whether x is seen to hold an Inf or a NaN. On a device that is never seen, and what follows must bear it."""
    return at_hand(x) and not all_finite(x)


def doubt(x: Tensor) -> Tensor:
    """One number, where x is: 0 if all of x is finite, else NaN. Added to what follows from x, it spoils that."""
    found = torch.full((1,), torch.nan, dtype=torch.float32, device=x.device)
    keep_finite_(found, torch.zeros_like(found), x)
    return found


def spoil_(x: Tensor, judged: Tensor) -> Tensor:
    """x, or NaN throughout if anything in `judged`, which may be x itself, is not finite. No device is waited for."""
    if not at_hand(judged):
        return x.add_(doubt(judged).to(x.dtype))
    return x if all_finite(judged) else x.fill_(torch.nan)


def keep_(kept: Tensor, new: Tensor) -> None:
    """kept = new, in kept's dtype, for who reads it in the next step: it need not pass through the caches."""
    check.flat("kept", kept, dtypes=check.FLOATS)
    check.flat("new", new, dtypes=check.FLOATS, like=kept, numel=kept.numel())
    implementation(reference.keep_, kept.device, kept.dtype, new.dtype)(kept, new)


def keep_finite_(kept: Tensor, new: Tensor, judged: Tensor) -> None:
    """kept = new if all of `judged` is finite; else kept stays as it is. No device is waited for.

    `kept` and `new` are of one size; `judged` may be any tensor on their device.
    """
    if kept.shape != new.shape or not kept.device == new.device == judged.device:
        raise ValueError(
            f"kept and new must be alike, got {tuple(kept.shape)} and {tuple(new.shape)} on "
            f"{kept.device}, {new.device} and {judged.device}"
        )
    if not at_hand(judged):
        implementation(reference.keep_finite_, kept.device, kept.dtype, new.dtype, judged.dtype)(kept, new, judged)
    elif all_finite(judged):
        keep_(kept.view(-1), new.view(-1))


def block_statistics(
    x: Tensor, starts: Tensor, block: int, *,
    absmean: Tensor | None = None, absmax: Tensor | None = None, square: Tensor | None = None,
    owed: Tensor | None = None, total: Tensor | None = None,
) -> None:  # fmt: skip
    """Per block: the mean of |x|, the maximum of |x|, the sum of x^2, each where asked for; an empty block has 0.

    An Inf in the block makes all three Inf, a NaN makes all three NaN: `isfinite(absmax)` says whether the block is
    clean. Squared norms of chunks of C elements are `block_statistics(x, starts, C, square=...)`. With `owed`, x + owed
    is formed in `total`, which may be x, and that is looked at; without, `total` is left alone.
    """
    check.flat("x", x, dtypes=check.FLOATS)
    count = check.blocks(starts, block, numel=x.numel()).count
    dtypes = [x.dtype]
    for name, out in (("absmean", absmean), ("absmax", absmax), ("square", square)):
        if out is not None:
            check.flat(name, out, dtypes=(torch.float32, torch.float64), like=x, numel=count)
            dtypes.append(out.dtype)
    check.owed(x, owed, total)
    implementation(reference.block_statistics, x.device, *dtypes)(
        x, starts, block, absmean=absmean, absmax=absmax, square=square, owed=owed, total=total
    )


def block_absmax(x: Tensor, starts: Tensor, block: int, out: Tensor) -> None:
    """out[j] = max |x| over block j; NaN if the block holds a NaN; 0 for an empty block."""
    block_statistics(x, starts, block, absmax=out)
