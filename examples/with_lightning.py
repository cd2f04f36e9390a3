"""Lightning's Trainer with compressed gradients, or with local steps; its checkpoint, one file, resumes to the bit.

python examples/with_lightning.py
python examples/with_lightning.py --every 10 --checkpoint /tmp/run
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.lightning import Thinwire


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        if self.global_rank == 0 and (self.global_step + 1) % 20 == 0:
            print(f"step {self.global_step + 1:4d}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def examples() -> TensorDataset:
    x = torch.randn(1280, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x @ torch.randn(64, 10, generator=torch.Generator().manual_seed(1))).argmax(1))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scheme", default="qsgd(bits=4)", help="what travels (see `thinwire list`)")
    options.add_argument(
        "--every", type=int, help="steps between two exchanges of weight changes; else gradients travel"
    )
    options.add_argument("--devices", type=int, default=2, help="processes, which Lightning starts")
    options.add_argument("--epochs", type=int, default=5, help="in all, of 20 steps on two devices")
    options.add_argument("--checkpoint", type=Path, help="a folder to save to, and to resume from")
    given = options.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    local = {"every": given.every, "outer": "average"} if given.every else {}
    wire = Thinwire(given.scheme, **local)  # the one line that is new
    trainer = pl.Trainer(
        accelerator="cpu", strategy="ddp", devices=given.devices, max_epochs=given.epochs, callbacks=[wire],
        enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    file = given.checkpoint / "last.ckpt" if given.checkpoint else None
    resume = str(file) if file and file.exists() else None
    trainer.fit(Classifier(), DataLoader(examples(), batch_size=32, shuffle=True), ckpt_path=resume)
    if file:
        trainer.save_checkpoint(file)
    if trainer.is_global_zero and wire.wire is not None:
        stats = wire.wire.stats()
        print(f"gave {stats['bytes_given'] / stats['bytes_dense']:.0%} of the bytes that plain DDP gives")


if __name__ == "__main__":
    main()
