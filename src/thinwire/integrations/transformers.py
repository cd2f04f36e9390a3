"""Transformers: a callback for its Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire import front
from thinwire.core.scheme import Scheme
from thinwire.integrations import files
from thinwire.integrations.models import checked, follow_scaler, made, parallel
from thinwire.logs import Meter
from thinwire.schemes import parse

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "thinwire.integrations.transformers needs Transformers: pip install transformers accelerate"
    ) from error

if TYPE_CHECKING:
    from thinwire import ddp, fsdp

ADVICE = "launch more than one process (torchrun)"


class Thinwire(TrainerCallback):
    """Sends the gradients of a Trainer's model through `scheme`.

        Trainer(..., callbacks=[Thinwire("qsgd(bits=4)")])

    log: whether the statistics go where the Trainer's logs go, with every log.
    options: those of `tw.attach`; of `exchange` and `replicas`, which need process groups, also functions that make
        them.

    `wire` is the connection, once training has begun. A checkpoint gets a file per rank, and `resume_from_checkpoint`
    finds it.
    """

    def __init__(self, scheme: str | Scheme, *, log: bool = True, **options: Any) -> None:
        self.scheme: Scheme = parse(scheme)
        self.log = log
        self.wire: ddp.Wire | fsdp.Replicas | fsdp.Shards | None = None
        self._options = checked(options, front.attach, frozenset({"model", "scheme"}))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.wire is not None:
            self.wire.close()  # of a run that broke off
        trainer, resumed = _told("resume_from_checkpoint")
        model: Any = trainer.model_wrapped
        self.wire = wire = front.attach(parallel(model, ADVICE), self.scheme, **made(self._options))
        follow_scaler(wire, trainer.accelerator.scaler)
        if resumed is not None:
            files.load(wire, resumed)
        self._trainer, self._meter = trainer, Meter(wire)
        self._seen: Any = 0.0
        if wire.steering is not None and not hasattr(trainer, "_tr_loss"):
            raise ValueError(
                "controller= needs the loss of every step, which this Trainer does not keep: transformers 5 does"
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Callbacks never see the loss of a step; the Trainer adds them up until it logs."""
        if self.wire is not None and self.wire.steering is not None:
            total = self._trainer._tr_loss.detach().clone()
            self.wire.observe(total - self._seen)
            self._seen = total

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.wire is not None
        trainer, trial = _told("trial")
        files.save(self.wire, Path(trainer._get_output_dir(trial=trial), f"checkpoint-{state.global_step}"))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.wire is None or "loss" not in (kwargs.get("logs") or {}):
            return
        self._seen = 0.0
        if self.log:
            values = self._meter.read()
            if values:
                self._trainer.log(values)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.wire is not None:
            self.wire.close()


def _told(name: str) -> tuple[Trainer, Any]:
    """The Trainer that calls, and what was given to it as `name`.

    Callbacks are told neither: they get the bare module, and no folder. Both are in the frames of the training loop.
    """
    frame = inspect.currentframe()
    while frame is not None:
        names = frame.f_locals
        if isinstance(names.get("self"), Trainer) and name in names:
            return names["self"], names[name]
        frame = frame.f_back
    raise ValueError("Thinwire is a callback of transformers.Trainer, which calls it while it trains")
