"""Accelerate: the user's loop over prepared objects, its own save_state and load_state, each rank its own residual."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.frameworks import Net, as_launched, by_hand, loss_of, residuals
from helpers.models import digest
from helpers.training import assert_equal, assert_replicas_equal
from helpers.world import run_world

TOPK = "topk(density=0.1)"


def prepared(spec=TOPK, **options):
    """(accelerator, model, optimizer, wire)"""
    as_launched()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from thinwire.integrations.accelerate import attach

    AcceleratorState._reset_state()  # it remembers the last one's precision
    GradientState._reset_state()
    accumulate = options.pop("accumulate", 1)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=options.pop("precision", "no"),
        log_with=options.pop("log_with", None),
    )  # fmt: skip
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    return accelerator, model, optimizer, attach(accelerator, model, spec, **options)


def train(accelerator, model, optimizer, wire, steps, *, accumulate=1):
    for micro in range(accumulate * steps.start, accumulate * steps.stop):
        with accelerator.accumulate(model):
            loss = loss_of(model, micro)
            accelerator.backward(loss)
            wire.observe(loss)
            optimizer.step()
            optimizer.zero_grad()


def _saves(folder):
    for spec, accumulate in ((TOPK, 1), ("qsgd(bits=4)", 1), (TOPK, 2)):
        begun = prepared(spec, accumulate=accumulate)
        train(*begun, range(8), accumulate=accumulate)
        begun[-1].close()
        assert_equal(digest(begun[1]), by_hand(spec, 8, accumulate=accumulate))
    _logs()
    _refuses()
    accelerator, model, _, wire = begun = prepared()
    train(*begun, range(4))
    accelerator.save_state(folder)
    files = sorted(path.name for path in Path(folder).glob("thinwire.*"))
    accelerator.wait_for_everyone()
    assert f"thinwire.rank{dist.get_rank():04d}.pt" in files
    train(*begun, range(4, 8))
    wire.close()
    return digest(model), residuals(wire)


def _logs():
    from accelerate.tracking import GeneralTracker

    class Rows(GeneralTracker):
        name, requires_logging_directory, tracker, main_process_only = "rows", False, None, False
        rows = ()

        def __init__(self):
            super().__init__()

        def log(self, values, step=None, **kwargs):
            self.rows += ((step, values),)

        def finish(self):
            pass

    tracker = Rows()
    accelerator, *_, wire = begun = prepared("qsgd(bits=4)", log_with=tracker, log_every=2, precision="bf16")
    accelerator.init_trackers("none")
    train(*begun, range(5))
    wire.close()
    if not accelerator.is_main_process:
        return
    assert [step for step, _ in tracker.rows] == [2, 4]
    assert 0 < tracker.rows[0][1]["thinwire/bytes_given_of_dense"] < 0.3


def _refuses():
    from torch.distributed.fsdp import FullyShardedDataParallel

    from thinwire.integrations.accelerate import attach

    accelerator, model, _, wire = prepared()
    refused = {
        "not under DDP or FSDP2": Net(),
        "under FSDP1, which has no place for a codec: use FSDP2": FullyShardedDataParallel(
            Net(), device_id=torch.device("cpu")
        ),
        "under DeepSpeed, which reduces gradients by itself": type("DeepSpeedEngine", (Net,), {})(),
    }
    for says, other in refused.items():
        with pytest.raises(ValueError, match=says) as caught:
            attach(accelerator, other, TOPK, name="other")
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="a wire named 'thinwire' already"):
        attach(accelerator, model, TOPK)
    with pytest.raises(TypeError, match="there is no option 'every'"):
        attach(accelerator, model, TOPK, name="other", every=3)
    wire.close()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled = attach(accelerator, model, TOPK, name="scaled")
    assert scaled.memory_scale == 8  # what is owed follows the scale of the loss
    scaled.close()


def _resumes(folder):
    accelerator, model, _, wire = begun = prepared()
    accelerator.load_state(folder)
    train(*begun, range(4, 8))
    wire.close()
    _other_folders(folder)
    return digest(model), residuals(wire)


def _other_folders(folder):
    accelerator, *_, wire = prepared()
    before = residuals(wire)
    accelerator.wait_for_everyone()
    if dist.get_rank() == 1:  # as if rank 0 had been killed before it wrote
        path = Path(folder, "thinwire.rank0001.pt")
        saved = torch.load(path, weights_only=True)
        saved["wire"]["step"] += 1
        torch.save(saved, path)
    accelerator.wait_for_everyone()
    with pytest.raises(ValueError, match=r"are of different steps, by rank: \[4, 5\]"):
        accelerator.load_state(folder)
    accelerator.wait_for_everyone()
    if dist.get_rank() == 0:  # of one rank only
        Path(folder, "thinwire.rank0001.pt").write_bytes(b"torn")
    accelerator.wait_for_everyone()
    with pytest.raises(ValueError, match="rank 1 cannot resume from"):
        accelerator.load_state(folder)
    accelerator.wait_for_everyone()
    if dist.get_rank() == 0:
        for path in Path(folder).glob("thinwire.*"):
            path.unlink()
    accelerator.wait_for_everyone()
    wire.load_state_dict(wire.state_dict())
    with pytest.warns(UserWarning, match="was saved without thinwire"):
        accelerator.load_state(folder)
    wire.close()
    assert before.keys() == residuals(wire).keys()


def _at_another_size(folder):
    accelerator, *_, wire = begun = prepared()
    accelerator.load_state(folder)
    owed = residuals(wire)
    train(*begun, range(4, 6))
    wire.close()
    return owed


def test_it_trains_as_by_hand_and_resumes_with_the_same_bits(tmp_path):
    folder = str(tmp_path)
    gone_on = run_world(_saves, 2, folder)
    owed = [torch.load(tmp_path / f"thinwire.rank000{i}.pt", weights_only=True)["wire"] for i in (0, 1)]
    others = run_world(_at_another_size, 3, folder)
    resumed = run_world(_resumes, 2, folder)
    for (weights, residual), (expected, expected_residual) in zip(resumed, gone_on, strict=True):
        assert_equal(weights, expected)
        assert_equal(list(residual.values()), list(expected_residual.values()))
    assert_replicas_equal([weights for weights, _ in gone_on])
    assert not torch.equal(gone_on[0][1]["net.0.weight"], gone_on[1][1]["net.0.weight"])
    for name in others[0]:
        before = sum(state[f"worker000{i}"][name]["residual"] for i, state in enumerate(owed)) / 2
        torch.testing.assert_close(sum(each[name] for each in others) / 3, before)
