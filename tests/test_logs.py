"""log_to: what a wire did, per step, to whoever has add_scalar() or log()."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import mlp
from helpers.training import train
from helpers.world import run_world


class Scalars:
    """As TensorBoard's SummaryWriter."""

    def __init__(self):
        self.rows = []

    def add_scalar(self, name, value, step):
        self.rows.append((step, name, value))


class Values:
    """As a W&B run."""

    def __init__(self):
        self.rows = []

    def log(self, values):
        self.rows.append(values)


def _logged():
    model = DDP(mlp())
    wire = tw.attach(model, "qsgd(bits=4)")
    scalars, values = Scalars(), Values()
    ends = [tw.log_to(wire, scalars, every=3), tw.log_to(wire, values, every=2), tw.log_to(wire, None)]
    train(model, 5)
    stats = wire.stats()
    for end in ends:
        end()
    train(model, 4)
    with pytest.raises(ValueError, match="Scalars has neither"):
        tw.log_to(wire, type("Scalars", (), {})())
    with pytest.raises(ValueError, match="every must be"):
        tw.log_to(wire, values, every=0)
    wire.close()
    return scalars.rows, values.rows, stats


def test_totals_become_amounts_per_step():
    for scalars, values, stats in run_world(_logged, 2):
        assert {step for step, _, _ in scalars} == {3}
        assert [row["thinwire/steps"] for row in values] == [2, 4]
        for row in ({name: value for _, name, value in scalars}, *values):
            assert row["thinwire/bytes_sent_per_step"] == pytest.approx(stats["bytes_sent"] / 5)
            assert row["thinwire/bytes_given_of_dense"] == pytest.approx(stats["bytes_given"] / stats["bytes_dense"])
            assert row["thinwire/level"] == 4 and row["thinwire/wire_seconds_per_step"] > 0


def _local():
    net, values = mlp(), Values()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    local = tw.LocalSteps(net, optimizer, every=4, scheme="fp16")
    tw.log_to(local, values, every=5)
    for step in range(12):
        net(torch.randn(4, 20, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
    local.close()
    return values.rows


def test_local_steps_are_logged_at_the_first_round_after():
    rows = run_world(_local, 1)[0]
    assert [row["thinwire/steps"] for row in rows] == [8, 12]
    assert rows[0]["thinwire/bytes_given_of_dense"] < 0.2  # 16 bits instead of 32, in one step of four
