"""Transformers' Trainer with compressed gradients: a small language model from nothing, on embedded text.

torchrun --nproc-per-node 2 examples/with_transformers.py
torchrun --nproc-per-node 2 examples/with_transformers.py --scheme "powersgd(factor_rank=4)" --checkpoint /tmp/run
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from thinwire.integrations.transformers import Thinwire

TEXT = "workers that train together tell each other what they learnt; over a thin wire they had better be brief. " * 40


def examples(length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Pieces of the text, a letter a token."""
    letters = torch.tensor([ord(letter) - 32 for letter in TEXT])
    return [{"input_ids": piece, "labels": piece} for piece in letters.split(length) if len(piece) == length]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scheme", default="qsgd(bits=4)", help="what travels (see `thinwire list`)")
    options.add_argument("--steps", type=int, default=100, help="in all")
    options.add_argument("--checkpoint", type=Path, help="a folder to save to, and to resume from")
    given = options.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, use_cache=False, **size))
    arguments = TrainingArguments(
        str(given.checkpoint or tempfile.gettempdir()), max_steps=given.steps, per_device_train_batch_size=8,
        learning_rate=3e-3, logging_steps=20, save_strategy="steps" if given.checkpoint else "no", save_steps=20,
        use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    wire = Thinwire(given.scheme)  # the one line that is new
    trainer = Trainer(model, arguments, train_dataset=examples(), callbacks=[wire])
    there = given.checkpoint is not None and given.checkpoint.exists()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(given.checkpoint)) if there else None)
    if trainer.is_world_process_zero() and wire.wire is not None:
        stats = wire.wire.stats()
        print(f"gave {stats['bytes_given'] / stats['bytes_dense']:.0%} of the bytes that plain DDP gives")


if __name__ == "__main__":
    main()
