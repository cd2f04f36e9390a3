"""Lightning: a callback for its Trainer, and `attach` for Fabric."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import front
from thinwire.core.scheme import Scheme
from thinwire.exchange import objects
from thinwire.integrations.models import checked, follow_scaler, made, parallel
from thinwire.local import LocalSteps
from thinwire.logs import Meter
from thinwire.schemes import parse

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from thinwire import ddp, fsdp
else:
    try:  # one package under two names: that of the user's Trainer
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            from pytorch_lightning.callbacks import Callback
        else:
            from lightning.pytorch.callbacks import Callback
    except ImportError:
        try:
            from pytorch_lightning.callbacks import Callback
        except ImportError as error:
            raise ImportError("thinwire.integrations.lightning needs Lightning: pip install lightning") from error

ADVICE = "Trainer(strategy='ddp', devices=2) or more, or Fabric with the same"
KEY = "thinwire"  # in a checkpoint


def attach(model: nn.Module, scheme: str | Scheme, **options: Any) -> ddp.Wire | fsdp.Replicas | fsdp.Shards:
    """`tw.attach` for a model that Fabric's `setup` returned. `options` are those of `tw.attach`.

    model, optimizer = fabric.setup(model, optimizer)
    wire = attach(model, "qsgd(bits=4)")
    fabric.save("one.ckpt", {"model": model, "optimizer": optimizer, "wire": wire.state_dict(gather="first")})
    """
    return front.attach(parallel(model, ADVICE), scheme, **options)


class Thinwire(Callback):
    """Sends the gradients of a Trainer's model through `scheme`; with `every`, the changes of its weights.

        Trainer(strategy="ddp", devices=2, callbacks=[Thinwire("qsgd(bits=4)")])

    every: steps between two exchanges of weight changes, as of `tw.LocalSteps`: gradients then stay where they are.
    log: whether the statistics go to the Trainer's loggers, every `log_every_n_steps`.
    options: those of `tw.attach`, or with `every` of `tw.LocalSteps`; of `exchange` and `replicas`, which need process
        groups, also functions that make them.

    `wire` is the connection, while and after the Trainer fits. A checkpoint, which is one file, has every rank's state.
    """

    def __init__(
        self, scheme: str | Scheme, *, every: int | Callable[[int], int] | None = None, log: bool = True, **options: Any
    ) -> None:
        self.scheme: Scheme = parse(scheme)
        self.every: int | Callable[[int], int] | None = every
        self.log: bool = log
        target, own = (front.attach, {"model"}) if every is None else (LocalSteps, {"model", "optimizer", "scaler"})
        self._options = checked(options, target, frozenset(own | {"scheme"}))
        self.wire: ddp.Wire | fsdp.Replicas | fsdp.Shards | LocalSteps | None = None
        self._saved: Mapping[str, Any] | None = None
        self._logged = -1  # the step of the last log
        self._shown = ExitStack()  # the anchor, while it is evaluated

    # -- the life of a fit ---------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        model = parallel(trainer.strategy.model, ADVICE)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self.every is None:
            self.wire = front.attach(model, self.scheme, **made(self._options))
            follow_scaler(self.wire, scaler)
        else:
            self.wire = self._local_steps(model, trainer.optimizers, scaler, automatic=pl_module.automatic_optimization)

    def _local_steps(self, model: Any, optimizers: list[Any], scaler: Any, *, automatic: bool) -> LocalSteps:
        if not isinstance(model, DistributedDataParallel) or len(optimizers) != 1 or not automatic:
            raise ValueError(
                "every= is for strategy='ddp', one optimizer and automatic optimization, got "
                f"{type(model).__name__}, {len(optimizers)} and {'automatic' if automatic else 'manual'}"
            )
        assert self.every is not None
        # As in no_sync(), for good: every worker's gradients, and between rounds its buffers, are its own.
        model.require_backward_grad_sync = model.require_forward_param_sync = False
        return LocalSteps(
            model.module, optimizers[0], every=self.every, scheme=self.scheme, scaler=scaler, **made(self._options)
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning reads checkpoints before DDP is there and optimizers after: now both are."""
        assert self.wire is not None
        saved, self._saved = self._saved, None
        if saved is not None:
            self._resume(saved, trainer)
        elif trainer.ckpt_path is not None:
            warnings.warn(f"{trainer.ckpt_path} was saved without thinwire: what is owed begins at zero", stacklevel=2)
        self._meter = Meter(self.wire)

    def _resume(self, saved: Mapping[str, Any], trainer: Any) -> None:
        assert self.wire is not None
        replicas = saved.get("replicas") or []
        if bool(replicas) != isinstance(self.wire, LocalSteps):
            there, here = ("with", "without") if replicas else ("without", "with")
            raise ValueError(f"the checkpoint was saved {there} every=, this is {here}: what is owed is something else")
        if isinstance(self.wire, LocalSteps) and len(replicas) == dist.get_world_size():
            mine = replicas[dist.get_rank()]
            trainer.lightning_module.load_state_dict(mine["model"])
            trainer.optimizers[0].load_state_dict(mine["optimizer"])
        self.wire.load_state_dict(saved["wire"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.wire is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self.wire.observe(loss)
        step = trainer.global_step
        if self.log and trainer.loggers and step % trainer.log_every_n_steps == 0 and step != self._logged:
            self._logged, values = step, self._meter.read()
            for logger in trainer.loggers if values else ():
                logger.log_metrics(values, step=step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(self.wire, LocalSteps) and trainer.state.fn == "fit":
            self._shown.enter_context(self.wire.synchronised())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._shown.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(self.wire, LocalSteps):
            self.wire.finish()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._shown.close()
        if self.wire is not None:
            self.wire.close()  # its state can still be saved

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """On every rank, though only the first writes."""
        if self.wire is None:
            return
        checkpoint[KEY] = {"wire": self.wire.state_dict(gather="first")}
        if isinstance(self.wire, LocalSteps):
            own = {"model": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
            checkpoint[KEY]["replicas"] = objects.gather_states(own, self.wire.groups[0], to_all=False)
            with self.wire.synchronised():  # the model of the checkpoint is what all have in common
                checkpoint["state_dict"] = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(KEY) if trainer.state.fn == "fit" else None
