"""Resuming on a parameter server: workers' and servers' state, to the bit."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import batch, digest, mlp
from helpers.world import run_world

CONTROLLER = "mqgrad(interval=2, levels_from=(2, 4, 8), seed=1)"


def _train(servers, down, controller, first, last, folder, spec="qsgd(bits=4, block=64)"):
    """Steps `first` to `last`, from and to the checkpoint in `folder`; weights and levels at the end."""
    role = tw.join(servers=servers, down=down, timeout_seconds=30)
    if role.serves:
        return role.serve()
    worker = role.exchange.worker
    model = DDP(mlp(), process_group=role.workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tw.attach(model, spec, exchange=role.exchange, feedback=True, controller=controller) as wire:
        if first:
            saved = torch.load(f"{folder}/{worker}", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            wire.load_state_dict(saved["wire"])
        levels = []
        for step in range(first, last):
            x, y = batch(worker, step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            levels.append(wire.stats()["level"])
            optimizer.step()
            # The learner's reward counts seconds; a clock of the test's own makes it the same in every run.
            if wire.steering is not None:
                wire.steering._began = 0.0
                wire.observe(loss)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
        torch.save(state, f"{folder}/{worker}")
        residuals = {name: entry["residual"].clone() for name, entry in wire.memory.state_dict().items()}
        return digest(model), levels, residuals, state["wire"]["exchange"]


@pytest.mark.parametrize(("servers", "down"), [(1, "same"), (2, "fp16")])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(servers, down, tmp_path):
    folders = [tmp_path / "whole", tmp_path / "halves"]
    for folder in folders:
        folder.mkdir()
    whole = run_world(_train, servers + 2, servers, down, None, 0, 10, str(folders[0]))
    run_world(_train, servers + 2, servers, down, None, 0, 5, str(folders[1]))
    halves = run_world(_train, servers + 2, servers, down, None, 5, 10, str(folders[1]))
    for (weights, _, residuals, _), (again, _, again_residuals, _) in zip(
        whole[servers:], halves[servers:], strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
        assert all(torch.equal(residuals[name], again_residuals[name]) for name in residuals)
    if down == "fp16":  # the servers' own error memory is in the first worker's state, and only there
        held = whole[servers][3]
        assert sorted(held) == ["server0000", "server0001"]
        assert all(entry["residual"].any() for server in held.values() for entry in server["memory"].values())
        assert whole[servers + 1][3] == {}


def test_the_controller_resumes_on_every_worker(tmp_path):
    run_world(_train, 3, 1, "same", CONTROLLER, 0, 8, str(tmp_path))
    run_world(_train, 3, 1, "same", CONTROLLER, 8, 16, str(tmp_path))
    first, second = (torch.load(tmp_path / str(worker), weights_only=True)["wire"]["steering"] for worker in (0, 1))
    assert first["learnt"]["decisions"] == second["learnt"]["decisions"] == 8
    assert first["learnt"]["levels"] == [2, 4, 8]
    assert first["learnt"]["learnt"] == second["learnt"]["learnt"]
