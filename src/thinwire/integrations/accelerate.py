"""Accelerate: `attach` after `prepare`; `save_state` and `load_state` then take every rank's state along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from thinwire import front
from thinwire.core.scheme import Scheme
from thinwire.integrations import files
from thinwire.integrations.models import checked, follow_scaler, made, parallel
from thinwire.logs import on_steps

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("thinwire.integrations.accelerate needs Accelerate: pip install accelerate") from error

if TYPE_CHECKING:
    from thinwire import ddp, fsdp

ADVICE = "launch more than one process (`accelerate launch`, torchrun), and attach() what prepare() returned"
_names: WeakKeyDictionary[Accelerator, set[str]] = WeakKeyDictionary()  # of the files of each


def attach(
    accelerator: Accelerator, model: nn.Module, scheme: str | Scheme, *, name: str = "thinwire", log_every: int = 50,
    **options: Any,
) -> ddp.Wire | fsdp.Replicas | fsdp.Shards:  # fmt: skip
    """`tw.attach` for a model that `accelerator.prepare` returned; every rank calls it, before `load_state`.

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        wire = attach(accelerator, model, "qsgd(bits=4)")

    name: of the files in a checkpoint's folder; models with wires of their own need names of their own.
    log_every: `accelerator.log` gets the statistics every so many steps; 0: never.
    options: those of `tw.attach`.

    With a controller, call `wire.observe(loss)` in your loop.
    """
    taken = _names.setdefault(accelerator, set())
    if name in taken:
        raise ValueError(f"this accelerator has a wire named {name!r} already: give the other model's another name=")
    options = made(checked(options, front.attach, frozenset({"model", "scheme"})))
    wire = front.attach(parallel(model, ADVICE), scheme, **options)
    taken.add(name)
    follow_scaler(wire, accelerator.scaler)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: files.save(wire, folder, name))
    accelerator.register_load_state_pre_hook(lambda models, folder: files.load(wire, folder, name))
    if log_every:
        on_steps(wire, log_every, lambda values, step: accelerator.log(values, step=step))
    return wire
