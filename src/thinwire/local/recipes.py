"""Recipes: published settings of local steps, as keyword arguments for `LocalSteps`."""

from __future__ import annotations

from typing import Any


def diloco(*, every: int = 100, lr: float = 0.7, momentum: float = 0.9) -> dict[str, Any]:
    """DiLoCo: Nesterov outside. The paper has every=500; others ran 100 (int8), 36 (lr 0.3) and 30 (lr 0.8 to 0.9).

    Changes travel as fp16, as others report without loss.
    """
    return {"every": every, "scheme": "fp16", "outer": f"nesterov(lr={lr!r}, momentum={momentum!r})"}


def streaming(*, every: int = 100, parts: int = 4, delay: int = 5, mix: float = 0.5) -> dict[str, Any]:
    """Streaming DiLoCo: a part at a time, while training goes on.

    Differs from the paper: parts are of about equal size and any tensors, the paper's are layers.
    """
    return diloco(every=every) | {"parts": parts, "delay": delay, "mix": mix}


def sparseloco(
    *, every: int = 30, density: float = 0.0156, decay: float = 0.95, bits: int = 2, lr: float = 1.0
) -> dict[str, Any]:
    """SparseLoCo: Top-k of the change with error feedback, few bits a value, no outer momentum.

    In print: every=15 with 3.1%, every=30 with 1.56%, decay 0.95, lr 1, 2 bits. The mean of an element is over those
    who sent it, as the authors' code has it; the paper's, over all, takes smaller steps and ended higher: on WikiText-2
    (four workers, 900 steps, three seeds) at 3.42 instead of 3.36 bits per byte, and with every=10 at 3.37, not 3.20.
    Differs from the paper: elements are chosen over a bucket, not in blocks of 64 x 64; values are rounded by `qsgd`
    without a codebook, which made no difference in a trial (docs/guide/local-steps.md); an element costs about 2 + 8
    bits by coded indices, theirs 2 + 12.
    """
    scheme = f"topk(density={density!r}, values='qsgd(bits={bits})', mean='senders')"
    return {"every": every, "scheme": scheme, "outer": f"sgd(lr={lr!r})", "decay": decay}
