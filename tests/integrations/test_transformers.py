"""Transformers' Trainer: its own loop, its own checkpoints, each rank its own residual."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.frameworks import Net, as_launched, by_hand, residuals
from helpers.models import batch, digest
from helpers.training import assert_equal, assert_replicas_equal
from helpers.world import run_world

TOPK = "topk(density=0.1)"


class Numbered(Net):
    """Its batch follows from the number of the example."""

    def forward(self, number):
        x, y = batch(int(number) % 2, int(number) // 2)
        return {"loss": nn.functional.mse_loss(self.net(x), y)}


def trained(callback, folder, *, model=None, data=None, resume=None, steps=8, accumulate=1, **options):
    as_launched()
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = model or Numbered()
    arguments = TrainingArguments(
        folder, max_steps=steps, gradient_accumulation_steps=accumulate, per_device_train_batch_size=1, max_grad_norm=0,
        use_cpu=True, disable_tqdm=True, report_to=[], logging_strategy="steps", logging_steps=4, save_steps=4,
        remove_unused_columns=False, **options,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = data or [{"number": torch.tensor(number)} for number in range(100)]
    trainer = InOrder(
        model, arguments, train_dataset=data, optimizers=(optimizer, constant),
        callbacks=[callback] if callback else [],
        data_collator=lambda examples: {key: torch.stack([each[key] for each in examples]) for key in examples[0]},
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer


def _saves(folder):
    from thinwire.integrations.transformers import Thinwire

    for spec, accumulate in ((TOPK, 1), ("qsgd(bits=4)", 1), (TOPK, 2)):
        model, trainer = trained(Thinwire(spec), f"{folder}/other", accumulate=accumulate, save_strategy="no")
        assert_equal(digest(model), by_hand(spec, 8, accumulate=accumulate))
    logged = [row for row in trainer.state.log_history if "thinwire/bytes_sent_per_step" in row]
    assert [row["step"] for row in logged] == [4, 8]
    with pytest.raises(TypeError, match="there is no option 'every'"):
        Thinwire(TOPK, every=3)
    with pytest.raises(ValueError, match=r"is a callback of transformers\.Trainer"):
        Thinwire(TOPK).on_train_begin(None, None, None)
    callback = Thinwire(TOPK)
    model, _ = trained(callback, folder, save_strategy="steps")
    return [*digest(model), *_language_model(folder)], residuals(callback.wire)


def _language_model(folder):
    """With recomputed activations, bfloat16, accumulation, and a controller that must hear of the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from thinwire.integrations.transformers import Thinwire

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **size))
    words = torch.randint(64, (100, 8), generator=torch.Generator().manual_seed(0))
    callback = Thinwire("qsgd(bits=4)", controller="mqgrad(interval=2)")
    before = digest(model)
    trained(
        callback, f"{folder}/language", model=model, data=[{"input_ids": row, "labels": row} for row in words],
        accumulate=2, bf16=True, gradient_checkpointing=True, save_strategy="no",
    )  # fmt: skip
    assert callback.wire.stats()["steps"] == 8
    assert callback.wire.steering.state_dict()["history"][-1] == pytest.approx(4, abs=1)  # log 64
    assert not torch.equal(before[0], digest(model)[0])
    return digest(model)


def _resumes(folder, steps):
    from thinwire.integrations.transformers import Thinwire

    found = []

    class Looking(Thinwire):
        def on_train_begin(self, *arguments, **options):
            super().on_train_begin(*arguments, **options)
            found.append(residuals(self.wire))

    callback = Looking(TOPK)
    resume = f"{folder}/checkpoint-4"
    model, _ = trained(callback, f"{folder}/elsewhere", resume=resume, steps=steps, save_strategy="no")
    assert callback.wire.stats()["steps"] == steps
    if dist.get_world_size() == 2:
        trained(None, f"{folder}/plain", steps=4, save_strategy="steps")
        with pytest.warns(UserWarning, match="was saved without thinwire"):
            trained(Thinwire(TOPK), f"{folder}/plain", resume=True, steps=5, save_strategy="no")
    return digest(model), residuals(callback.wire), found[0]


def test_it_trains_as_by_hand_and_resumes_with_the_same_bits(tmp_path):
    folder = str(tmp_path)
    gone_on = run_world(_saves, 2, folder)
    assert_replicas_equal([weights for weights, _ in gone_on])
    assert not torch.equal(gone_on[0][1]["net.0.weight"], gone_on[1][1]["net.0.weight"])
    resumed = run_world(_resumes, 2, folder, 8)
    for (weights, residual, _), (expected, expected_residual) in zip(resumed, gone_on, strict=True):
        assert_equal(weights, expected[: len(weights)])
        assert_equal(list(residual.values()), list(expected_residual.values()))
    (_, _, owed), *_ = run_world(_resumes, 1, folder, 5)
    for name, residual in owed.items():
        torch.testing.assert_close(residual, sum(taken[name] for _, _, taken in resumed) / 2)
