"""Logs: what a wire did, as scalars for whoever draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.reducer import Reducer


class Meter:
    """A wire's statistics since they were read last: totals become amounts per step, the rest is as it is now.

    Names end in their unit, or in what they are a share of.
    """

    def __init__(self, wire: Reducer, prefix: str = "thinwire/") -> None:
        self._wire, self._prefix = wire, prefix
        self._before = wire.stats()

    def read(self) -> dict[str, float]:
        """By name; nothing where no step was made since."""
        before, self._before = self._before, self._wire.stats()
        now = self._before
        steps = now["steps"] - before["steps"]
        if steps <= 0:
            return {}
        values: dict[str, float] = {}
        for name, value in now.items():
            if _adds_up(name):
                values[f"{name}_per_step"] = (value - before.get(name, 0.0)) / steps
            else:
                values[name] = value
        if values["bytes_dense_per_step"]:
            values["bytes_given_of_dense"] = values["bytes_given_per_step"] / values["bytes_dense_per_step"]
        return {f"{self._prefix}{name}": value for name, value in values.items()}


def log_to(wire: Reducer, writer: Any, *, every: int = 50) -> Callable[[], None]:
    """Have `writer` hear of `wire.stats()` every so many steps, per step; what to call to end that.

    >>> class Printer:
    ...     def log(self, values):
    ...         print(int(values["thinwire/steps"]), round(values["thinwire/bytes_given_of_dense"], 2))
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 10))
    >>> with tw.attach(model, "qsgd(bits=4)") as wire:
    ...     end = tw.log_to(wire, Printer(), every=2)
    ...     for x in torch.randn(4, 8, 1024):
    ...         model(x).sum().backward()
    2 0.13
    4 0.13

    writer: has `add_scalar(name, value, step)`, as TensorBoard's, or `log(values)`, as W&B's: there `thinwire/steps` is
        among the values, and the step is the writer's own. None, as on ranks that do not log: nothing.
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a number of steps, 1 or more, got {every!r}")
    if writer is None:
        return lambda: None
    if callable(getattr(writer, "add_scalar", None)):
        return on_steps(wire, every, lambda values, step: _add_scalars(writer, values, step))
    if callable(getattr(writer, "log", None)):
        return on_steps(wire, every, lambda values, step: writer.log(values))
    raise ValueError(f"a writer has add_scalar() or log(), {type(writer).__name__} has neither")


def on_steps(wire: Reducer, every: int, write: Callable[[dict[str, float], int], object]) -> Callable[[], None]:
    """Call `write(values, step)` once in every so many steps; what to call to end that.

    Where a wire speaks less often than that, as local steps do, at the first time after.
    """
    meter, written = Meter(wire), wire.steps // every

    def after_step() -> None:
        nonlocal written
        if wire.steps // every != written:
            written = wire.steps // every
            values = meter.read()
            if values:
                write(values, wire.steps)

    def end() -> None:
        if after_step in wire.after_step:
            wire.after_step.remove(after_step)

    wire.after_step.append(after_step)
    return end


def _adds_up(name: str) -> bool:
    """Whether a statistic is a total since the start."""
    return name.startswith("bytes_") or name.endswith("_seconds") or name in ("messages", "sends")


def _add_scalars(writer: Any, values: dict[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)
