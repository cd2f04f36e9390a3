"""Attempts: to hear of every step that a training loop tries, those included that a GradScaler skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def on_attempts(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,  # type: ignore[reportPrivateImportUsage]
    attempted: Callable[[], None],
) -> Callable[[], None]:
    """Call `attempted` after every `optimizer.step()`, or every `scaler.step(optimizer)`; what to call to end that.

    A step that the scaler skips never reaches the optimizer, and on one rank only: counted by the optimizer's hook,
    ranks would drift apart.
    """
    if scaler is None:
        return optimizer.register_step_post_hook(lambda *_: attempted()).remove
    plain = scaler.step

    def step(stepped: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        result = plain(stepped, *args, **kwargs)
        if stepped is optimizer:
            attempted()
        return result

    scaler.__dict__["step"] = step  # this scaler's alone

    def end() -> None:
        if scaler.__dict__.get("step") is step:
            del scaler.__dict__["step"]

    return end
