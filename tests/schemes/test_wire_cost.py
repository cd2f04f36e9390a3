"""What quantisers send on real ranks, by the ledger, in bits per coordinate."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.world import run_world
from thinwire.schemes import parse

SPECS = (
    "fp16", "tnq(bits=4)", "tnq(bits=3, group='tensor')", "tnq(budget=3.2)", "tq(bits=2)", "nq(bits=4)", "thc",
    "thc(saturate=True)", "eden(bits=2)", "signsgd", "tnq(model='powerlaw')",
    "qsgd(bits=3, range='norm')", "nuqsgd(bits=2)",
)  # fmt: skip
STEPS = 2
ENTRIES = 2 * 512 * 512


def _stats():
    told = {}
    for spec in SPECS:
        torch.manual_seed(0)
        model = DDP(nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)))
        with tw.attach(model, spec) as wire:
            for _ in range(STEPS):
                model(torch.randn(8, 512)).square().mean().backward()
            told[spec] = wire.stats()
    return told


@pytest.mark.parametrize("workers", [2, 4])
def test_bits_and_scales(workers):
    passes = 2 * (workers - 1) / workers  # of every entry through a worker, by an all-reduce or a two-shot
    stats = run_world(_stats, workers)
    for rank in stats:
        bits = {spec: 8 * rank[spec]["bytes_sent"] / STEPS / ENTRIES / passes for spec in SPECS}
        assert bits["fp16"] == pytest.approx(16, rel=0.01)
        expected = {
            "tnq(bits=4)": 4 + 32 / 1024,
            "tnq(bits=3, group='tensor')": 3,
            "tq(bits=2)": 2 + 32 / 1024,
            "nq(bits=4)": 4 + 32 / 1024,
            "thc": parse("thc").width(workers) + 32 / 4096,
            "thc(saturate=True)": 4 + 32 / 4096,
            "eden(bits=2)": 2 + 32 / 1024,
            "signsgd": 1,
            "qsgd(bits=3, range='norm')": 3 + 32 / 1024,
            "nuqsgd(bits=2)": 2 + 32 / 1024,
        }
        for spec, cost in expected.items():
            assert bits[spec] == pytest.approx(cost, rel=0.02), spec
        assert bits["tnq(budget=3.2)"] <= 3.2 + 32 / 1024 + 0.02
        assert rank["tnq(bits=4)"]["bytes_sent"] <= 0.3 * rank["fp16"]["bytes_sent"]
        assert 0 <= rank["tnq(model='powerlaw')"]["powerlaw_fallbacks"] <= STEPS * (2 + 2 * workers)
        assert "powerlaw_fallbacks" not in rank["tnq(bits=4)"]
