"""The errors on the page of troubleshooting are those that the code raises, word for word."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from helpers.ranks import launch, outcome
from helpers.world import run_world

PAGE = (Path(__file__).parent.parent / "docs/guide/troubleshooting.md").read_text()
ERRORS = [text.strip() for text in re.findall(r"^```pytb\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]


def model():
    return DistributedDataParallel(nn.Linear(1024, 10))


def hooked():
    made = model()
    made.register_comm_hook(None, fp16_compress_hook)
    tw.attach(made, "fp16")


def attached_twice():
    made = model()
    with tw.attach(made, "fp16"):
        tw.attach(made, "qsgd(bits=4)")


def of_another_scheme():
    made = model()
    with tw.attach(made, "qsgd(bits=4)") as wire:
        state = wire.state_dict()
    with tw.attach(made, "topk(density=0.01)") as wire:
        wire.load_state_dict(state)


def of_other_workers():
    with tw.attach(model(), "topk(density=0.01)") as wire:
        wire.load_state_dict(wire.state_dict() | {"workers": 4})


def no_loss():
    made = model()
    with tw.attach(made, "qsgd(bits=4)", controller="mqgrad") as wire:
        for _ in range(2):
            made(torch.randn(2, 1024)).sum().backward()
        assert wire.steps == 2


def differing():
    tw.attach(model(), f"qsgd(bits={4 - 2 * dist.get_rank()})")


DYING = """
import os, torch, torch.distributed as dist, thinwire as tw
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 10))
tw.attach(model, "qsgd(bits=4)")
for step in range(4):
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    model(torch.randn(2, 1024)).sum().backward()
"""


ALONE = {
    1: lambda: tw.attach(nn.Linear(4, 4), "fp16"),
    2: lambda: tw.attach(model(), "qsgd(bit=4)"),
    4: hooked,
    5: attached_twice,
    7: of_another_scheme,
    8: of_other_workers,
    9: no_loss,
    10: lambda: tw.Gossip(nn.Linear(4, 4), graph=tw.graphs.ring(4)),
}
TOGETHER = {3: differing, 6: DYING}


def test_the_page_has_ten():
    assert len(ERRORS) == 10 == len(ALONE) + len(TOGETHER)
    assert [int(number) for number in re.findall(r"^## (\d+)\.", PAGE, re.MULTILINE)] == list(range(1, 11))


@pytest.mark.parametrize("number", ALONE)
def test_one_process_raises_it(number, tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            ALONE[number]()
    finally:
        dist.destroy_process_group()
    assert f"{raised.type.__name__}: {raised.value}".startswith(ERRORS[number - 1])


def told(raises):
    """What this rank is told, if anything."""
    try:
        raises()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_two_processes_raise_it():
    for said in run_world(told, 2, TOGETHER[3]):
        assert said.startswith(ERRORS[2])


def test_the_others_raise_it_when_one_dies():
    survivor, _ = (outcome(process, 90) for process in launch(TOGETHER[6], 2))
    assert ERRORS[5] in survivor[2]
