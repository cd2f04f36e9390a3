"""Lightning's Trainer and Fabric: its own loops, its own checkpoints, each rank its own residual."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.frameworks import Net, as_launched, by_hand, loss_of, residuals
from helpers.models import batch as sample
from helpers.models import digest
from helpers.training import assert_equal, assert_replicas_equal
from helpers.world import run_world

TOPK = "topk(density=0.1)"


LOCAL = {"every": 3, "outer": "sgd(lr=1)"}  # so that an epoch of four steps ends in the middle of a round


def packages():
    """Lightning, under either of its names, and our adapter."""
    as_launched()
    pl = sys.modules.get("pytorch_lightning") or importlib.import_module("lightning.pytorch")
    return pl, importlib.import_module("thinwire.integrations.lightning")


def module(pl, *, norm=False):
    class Trained(pl.LightningModule, Net):
        """Its batches follow from the step, whatever the loader brings."""

        losses = ()

        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(20, affine=False) if norm else torch.nn.Identity()

        def forward(self, x):
            return super().forward(self.norm(x))

        def training_step(self, micro, number):
            accumulate = self.trainer.accumulate_grad_batches
            return loss_of(self, accumulate * self.global_step + int(micro) % accumulate)

        def validation_step(self, batch, number):
            x, y = sample(0, 1000)
            self.losses += (float(torch.nn.functional.mse_loss(self(x), y)),)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Trained()


def fitted(callback, *, epochs=2, accumulate=1, resume=None, folder=None, validate=False, model=None, **options):
    """Epochs of four steps."""
    pl, _ = packages()
    model = model or module(pl, norm=bool(callback and callback.every))  # with buffers that are each replica's own
    keeps = [pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else []
    options = {
        "accelerator": "cpu", "devices": dist.get_world_size(), "strategy": "ddp", "logger": False,
        "enable_checkpointing": bool(folder), "callbacks": [callback, *keeps] if callback else keeps,
    } | options  # fmt: skip
    trainer = pl.Trainer(
        max_epochs=epochs, accumulate_grad_batches=accumulate, use_distributed_sampler=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(range(4 * accumulate), batch_size=None)
    unseen = torch.utils.data.DataLoader(range(1), batch_size=None) if validate else None
    trainer.fit(model, data, unseen, ckpt_path=resume)
    return model, trainer


def _trains(folder):
    pl, lightning = packages()
    # Its loop gives the bits of one that is written by hand, also where gradients are accumulated.
    for spec in (TOPK, "qsgd(bits=4)"):
        assert_equal(digest(fitted(lightning.Thinwire(spec))[0]), by_hand(spec, 8))
    callback = lightning.Thinwire("qsgd(bits=4)", controller="mqgrad(interval=2)")  # which must be told of the loss
    logger = pl.loggers.CSVLogger(folder, name="", version="")
    model, _ = fitted(callback, accumulate=2, logger=logger, log_every_n_steps=4)
    assert callback.wire.stats()["steps"] == 8
    if dist.get_rank() == 0:
        rows = list(csv.DictReader(Path(folder, "metrics.csv").read_text().splitlines()))
        assert [int(row["step"]) for row in rows] == [4, 8]
        assert 0 < float(rows[1]["thinwire/bytes_given_of_dense"]) < 0.3
    assert_equal(digest(fitted(lightning.Thinwire(TOPK), accumulate=2)[0]), by_hand(TOPK, 8, accumulate=2))
    low, _ = fitted(lightning.Thinwire(TOPK), precision="bf16-mixed")
    return [*digest(model), *digest(low)]


def _saves(folder):
    trained = _trains(f"{folder}/logs")
    _, lightning = packages()
    found = []
    for kind, options in (("ddp", {}), ("local", LOCAL)):
        callback = lightning.Thinwire(TOPK, **options)
        model, _ = fitted(callback, folder=f"{folder}/{kind}", validate=True)
        found.append(([*digest(model), *model.buffers()], residuals(callback.wire), model.losses))
    _others(f"{folder}/others")
    return trained, found


def _resumes(folder):
    _, lightning = packages()
    found = []
    for kind, options in (("ddp", {}), ("local", LOCAL)):
        callback = lightning.Thinwire(TOPK, **options)
        model, _ = fitted(callback, resume=f"{folder}/{kind}/epoch=0.ckpt", validate=True)
        assert callback.wire.stats()["steps"] == 8
        buffers = [buffer.clone() for buffer in model.buffers()]
        found.append(([*digest(model), *buffers], residuals(callback.wire), model.losses))
        with pytest.raises(ValueError, match="the checkpoint was saved with"):
            other = lightning.Thinwire(TOPK, **({} if options else LOCAL))
            fitted(other, resume=f"{folder}/{kind}/epoch=0.ckpt", model=model)
    return found


def _at_another_size(folder):
    """What is owed, as it is taken, before the first step. Under Lightning's other name."""
    importlib.import_module("pytorch_lightning")
    pl, lightning = packages()
    assert issubclass(lightning.Thinwire, pl.Callback) and "lightning.pytorch" not in sys.modules
    found = []

    class Looking(lightning.Thinwire):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            found.append(
                (residuals(self.wire), {name: tensor.clone() for name, tensor in pl_module.state_dict().items()})
            )

    for kind, options in (("ddp", {}), ("local", LOCAL)):
        fitted(Looking(TOPK, **options), resume=f"{folder}/{kind}/epoch=0.ckpt")
    return found


def test_it_trains_as_by_hand_and_resumes_with_the_same_bits(tmp_path):
    """From one file, in new processes; of local steps, in the middle of a round."""
    folder = str(tmp_path)
    gone_on = run_world(_saves, 2, folder)
    resumed = run_world(_resumes, 2, folder)
    alone = run_world(_at_another_size, 1, folder)[0]
    assert_replicas_equal([trained for trained, _ in gone_on])
    for number, kind in enumerate(("ddp", "local")):
        pair = [found[number] for _, found in gone_on]
        for (expected, owed, losses), other in zip(pair, (found[number] for found in resumed), strict=True):
            assert_equal(other[0], expected)
            assert_equal(list(other[1].values()), list(owed.values()))
            assert other[2] == losses[1:]  # of the second epoch
        assert not torch.equal(*(owed["net.0.weight"] for _, owed, _ in pair))
        assert_equal(*(weights for weights, _, _ in pair))
        assert pair[0][2] == pair[1][2]  # replicas are evaluated on what they have in common

        saved = torch.load(tmp_path / kind / "epoch=0.ckpt", weights_only=True)
        state, (owed, weights) = saved["thinwire"]["wire"], alone[number]
        for name, residual in owed.items():
            torch.testing.assert_close(residual, sum(state[f"worker{i:04d}"][name]["residual"] for i in range(2)) / 2)
        assert_equal(list(weights.values()), list(saved["state_dict"].values()))
        if kind == "local":  # the model of the checkpoint is what all had in common
            anchor = state["local"]["anchor"]
            assert "norm.running_mean" in anchor
            assert_equal([weights[name] for name in anchor], list(anchor.values()))
            assert not torch.equal(*(each["model"]["net.0.weight"] for each in saved["thinwire"]["replicas"]))


def _others(folder):
    pl, lightning = packages()
    fitted(None, epochs=1, folder=folder)
    with pytest.warns(UserWarning, match="was saved without thinwire"):
        fitted(lightning.Thinwire(TOPK), resume=f"{folder}/epoch=0.ckpt")
    with pytest.raises(ValueError, match=r"^Trained is not under DDP or FSDP2 \(2 processes\), so nothing is sent: Tr"):
        fitted(lightning.Thinwire(TOPK), strategy="auto", devices=1)
    manual = module(pl)
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match="got DistributedDataParallel, 1 and manual"):
        fitted(lightning.Thinwire(TOPK, every=3), model=manual)
    with pytest.raises(TypeError, match="there is no option 'bits'; those of attach are replicas, exchange"):
        lightning.Thinwire("qsgd", bits=4)
    _fabric(lightning, folder)
    _sharded(pl, lightning, folder)


def _fabric(lightning, folder):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()

    def begun():
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        return model, optimizer, lightning.attach(model, TOPK)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, step))
            optimizer.step()

    model, optimizer, wire = begun()
    train(model, optimizer, range(4))
    states = {"model": model, "optimizer": optimizer, "wire": wire.state_dict(gather="first")}
    fabric.save(f"{folder}/fabric.ckpt", states)
    train(model, optimizer, range(4, 8))
    wire.close()
    assert_equal(digest(model), by_hand(TOPK, 8))
    again, other, resumed = begun()
    resumed.load_state_dict(fabric.load(f"{folder}/fabric.ckpt", {"model": again, "optimizer": other})["wire"])
    train(again, other, range(4, 8))
    resumed.close()
    assert_equal(digest(model), digest(again))
    with pytest.raises(ValueError, match="not under DDP"):
        lightning.attach(Net(), TOPK)


def _sharded(pl, lightning, folder):
    """FSDP2, by Lightning's own strategy."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Sharded(type(module(pl))):
        def configure_model(self):
            if not hasattr(self.net, "reshard"):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def fit(resume=None):
        callback, strategy = lightning.Thinwire("qsgd(bits=4)", feedback=True), ModelParallelStrategy(2, 1)
        keep = [pl.callbacks.ModelCheckpoint(folder, "sharded-{epoch}", save_top_k=-1)]
        model = Sharded()
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, callbacks=[callback, *keep], logger=False,
            use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(range(4), batch_size=None), ckpt_path=resume)
        assert callback.wire.stats()["steps"] == 8
        return [p.full_tensor() for p in model.parameters()], residuals(callback.wire)

    (whole, owed), (again, owed_again) = fit(), fit(f"{folder}/sharded-epoch=0.ckpt")
    assert_equal(whole, again)
    assert_equal(list(owed.values()), list(owed_again.values()))
