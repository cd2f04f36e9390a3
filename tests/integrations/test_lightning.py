"""Lightning's Trainer and Fabric: its own loops, its own checkpoints, each rank its own residual."""

import csv
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.frameworks import Net, as_launched, by_hand, loss_of, residuals
from helpers.models import digest
from helpers.training import assert_equal, assert_replicas_equal
from helpers.world import run_world

TOPK = "topk(density=0.1)"


def packages():
    as_launched()
    import lightning.pytorch as pl

    from thinwire.integrations import lightning

    return pl, lightning


def module(pl):
    class Trained(pl.LightningModule, Net):
        """Its batches follow from the step, whatever the loader brings."""

        losses = ()

        def training_step(self, micro, number):
            accumulate = self.trainer.accumulate_grad_batches
            return loss_of(self, accumulate * self.global_step + int(micro) % accumulate)

        def validation_step(self, batch, number):
            self.losses += (float(loss_of(self, 1000)),)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Trained()


def fitted(callback, *, epochs=2, accumulate=1, resume=None, folder=None, validate=False, **options):
    """Epochs of four steps."""
    pl, _ = packages()
    model = module(pl)
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


def _saves(folder, options):
    _, lightning = packages()
    callback = lightning.Thinwire(TOPK, **options)
    model, _ = fitted(callback, folder=folder, validate=True)
    return digest(model), residuals(callback.wire), model.losses


def _resumes(folder, options):
    _, lightning = packages()
    callback = lightning.Thinwire(TOPK, **options)
    model, _ = fitted(callback, resume=f"{folder}/epoch=0.ckpt", validate=True)
    assert callback.wire.stats()["steps"] == 8
    return digest(model), residuals(callback.wire), model.losses


def test_its_loop_trains_as_one_by_hand_and_logs(tmp_path):
    assert_replicas_equal(run_world(_trains, 2, str(tmp_path)))


@pytest.mark.parametrize("options", [{}, {"every": 3, "outer": "sgd(lr=1)"}], ids=["gradients", "local steps"])
def test_a_resumed_run_goes_on_with_the_same_bits(options, tmp_path):
    """One file, in new processes; of local steps, in the middle of a round."""
    gone_on = run_world(_saves, 2, str(tmp_path), options)
    resumed = run_world(_resumes, 2, str(tmp_path), options)
    for (weights, owed, losses), (expected, expected_owed, all_losses) in zip(resumed, gone_on, strict=True):
        assert_equal(weights, expected)
        assert_equal(list(owed.values()), list(expected_owed.values()))
        assert losses == all_losses[1:]  # those of the anchor, where replicas differ
    assert not torch.equal(gone_on[0][1]["net.0.weight"], gone_on[1][1]["net.0.weight"])
    equal = all(torch.equal(*pair) for pair in zip(gone_on[0][0], gone_on[1][0], strict=True))
    assert equal == (not options)

    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    if options:
        anchor = saved["thinwire"]["wire"]["local"]["anchor"]
        assert_equal([saved["state_dict"][name] for name in anchor], list(anchor.values()))
    alone = run_world(_at_another_size, 1, str(tmp_path), options)[0]
    states = saved["thinwire"]["wire"]
    for name, owed in alone.items():
        torch.testing.assert_close(owed, sum(states[f"worker{i:04d}"][name]["residual"] for i in range(2)) / 2)


def _at_another_size(folder, options):
    """What is owed, as it is taken, before the first step."""
    _, lightning = packages()
    found = {}

    class Looking(lightning.Thinwire):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            found.update(residuals(self.wire))

    model, _ = fitted(Looking(TOPK, **options), resume=f"{folder}/epoch=0.ckpt")
    assert all(p.isfinite().all() for p in model.parameters())
    return found


def _others(folder):
    pl, lightning = packages()
    fitted(None, epochs=1, folder=folder)
    with pytest.warns(UserWarning, match="was saved without thinwire"):
        fitted(lightning.Thinwire(TOPK), resume=f"{folder}/epoch=0.ckpt")
    with pytest.raises(ValueError, match=r"^Trained is not under DDP or FSDP2 \(2 processes\), so nothing is sent: Tr"):
        fitted(lightning.Thinwire(TOPK), strategy="auto", devices=1)
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


def test_fabric_sharded_models_and_what_is_refused(tmp_path):
    run_world(_others, 2, str(tmp_path))
