"""LocalSteps in unusual loops: odd weights, bfloat16, a GradScaler, workers apart, sites, two levels."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.loops import sgd, steps
from helpers.models import batch, digest, mlp
from helpers.training import assert_equal, assert_replicas_equal
from helpers.world import run_world


class Unusual(nn.Module):
    """Tied and frozen weights, batch norm, an integer buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.first, self.norm, self.last = nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Linear(20, 40)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(7, 7), requires_grad=False)

    def forward(self, x):
        return (self.norm(self.first(x) + self.last(x))[:, :7]) @ self.frozen


def _unusual(compiled):
    net = Unusual()
    model = torch.compile(net, backend="aot_eager") if compiled else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    with tw.LocalSteps(model, optimizer, every=3, scheme="qsgd(bits=8)") as local:
        for step in range(6):
            optimizer.zero_grad()
            for micro in range(2):
                x, y = batch(dist.get_rank(), 10 * step + micro)
                nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        assert local.stats()["rounds"] == 2 and optimizer.param_groups[0]["lr"] == 0.01 * 0.5**3
        assert net.norm.num_batches_tracked == 12
    return [p.detach().clone() for p in [*net.parameters(), *net.buffers()]]


@pytest.mark.parametrize("compiled", [False, True])
def test_tied_frozen_and_normalised_weights_in_an_ordinary_loop(compiled):
    assert_replicas_equal(run_world(_unusual, 2, compiled))


def _bfloat16():
    net = mlp().bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with tw.LocalSteps(net, optimizer, every=2, scheme="fp32", outer="sgd(lr=0.001)") as local:
        assert all(p.dtype is torch.float32 for p in local.anchor.weights.values())
        begun = {name: p.detach().clone() for name, p in local.anchor.weights.items()}
        local.sync()
        for name, p in local.anchor.weights.items():
            assert torch.equal(p, begun[name]), "what rounding took is nobody's change"
        for step in range(20):
            x, y = batch(dist.get_rank(), step, torch.bfloat16)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        moved = sum((p != begun[name]).sum() for name, p in local.anchor.weights.items())
        seen = sum((p != begun[name].bfloat16()).sum() for name, p in net.named_parameters())
        assert moved > 2 * seen, "steps too small for bfloat16 add up in the anchor"
        for name, p in net.named_parameters():
            assert torch.equal(p, local.anchor.weights[name].bfloat16())
    return digest(net)


def test_the_anchor_is_float32_under_bfloat16_weights():
    assert_replicas_equal(run_world(_bfloat16, 2))


def _scaled(given):
    net = mlp()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
    with tw.LocalSteps(net, optimizer, every=2, scheme="fp32", scaler=scaler if given else None) as local:
        for step in range(4):
            x, y = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            if dist.get_rank() == 0 and step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        local.sync()
        rounds = local.stats()["rounds"]
    assert "step" not in vars(scaler)
    return rounds, digest(net)


def test_steps_that_a_scaler_skips_count():
    results = run_world(_scaled, 2, True)
    assert [rounds for rounds, _ in results] == [3, 3]
    assert_replicas_equal([weights for _, weights in results])


def test_workers_that_have_drifted_apart_are_named_with_what_to_do():
    with pytest.raises(RuntimeError, match=r"different numbers of steps, \{0: 3, 1: 4\}: give a GradScaler as scaler="):
        run_world(_scaled, 2, False)


def _weighted():
    net = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with tw.LocalSteps(net, optimizer, every=9, scheme="fp32", outer="average", weighted=True, exempt=()) as local:
        begun = net.weight.detach().clone()
        for _ in range(1 + 2 * dist.get_rank()):  # 1 and 3 steps, each adds rank + 1
            net.weight.grad = torch.full_like(net.weight, -1.0 - dist.get_rank())
            optimizer.step()
        local.sync()
        return net.weight.detach() - begun


def test_workers_may_count_by_the_steps_they_made():
    for change in run_world(_weighted, 2):
        torch.testing.assert_close(change, torch.full((4, 4), (1 * 1 + 3 * 6) / 4))


def _weighted_buffers():
    """Two rounds at one place: in the second nobody has made a step."""
    net = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with tw.LocalSteps(net, optimizer, every=9, scheme="fp32", outer="average", weighted=True) as local:
        for _ in range(1 + 2 * dist.get_rank()):
            net.weight.grad = torch.zeros_like(net.weight)
            optimizer.step()
        net.running_mean.fill_(8.0 * dist.get_rank())
        local.sync()
        once = net.running_mean.clone()
        local.sync()
        return once, net.running_mean.clone()


def test_buffers_count_by_steps_too_and_stay_where_nobody_made_one():
    for once, again in run_world(_weighted_buffers, 2):
        torch.testing.assert_close(once, torch.full((3,), (1 * 0 + 3 * 8.0) / 4))
        torch.testing.assert_close(again, once)


def _site(sharded):
    """Ranks 0, 1 are one site, 2, 3 another; each rank speaks with its like in the other site."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    inside = mesh["inside"]
    model = fully_shard(net, mesh=inside) if sharded else DDP(net, process_group=inside.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="between sites"):
        tw.LocalSteps(model, optimizer)
    with tw.LocalSteps(model, optimizer, every=2, scheme="qsgd(bits=8)", group=mesh["between"].get_group()):
        steps(model, optimizer, 0, 4)
    return [p.full_tensor() if sharded else p.detach() for p in net.parameters()]


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_a_site_may_be_data_parallel_inside(sharded):
    weights = run_world(_site, 4, sharded)
    assert_replicas_equal(weights)
    assert not torch.equal(weights[0][0], mlp()[0].weight)


def _two_levels(spec):
    """Two machines of two workers, one of which is not finite in one round."""
    net = mlp()
    optimizer = sgd(net)
    with tw.LocalSteps(net, optimizer, every=2, scheme=spec, exchange=tw.Hierarchical.of_nodes(2)) as local:
        steps(net, optimizer, 0, 2)
        synced = digest(net)
        if dist.get_rank() == 1:
            with torch.no_grad():
                net[2].weight[0, 0] = float("inf")
            with pytest.warns(UserWarning, match="not finite"):
                steps(net, optimizer, 2, 2)
        else:
            steps(net, optimizer, 2, 2)
        assert_equal(synced, digest(net))
        assert local.stats()["void_rounds"] == 1
        steps(net, optimizer, 4, 2)
    assert not torch.equal(synced[0], net[0].weight)
    return digest(net)


@pytest.mark.parametrize("spec", ["fp32", "qsgd(bits=4)", "topk(density=0.1)"])
def test_over_two_levels_replicas_are_equal_and_a_void_round_is_everybodys(spec):
    assert_replicas_equal(run_world(_two_levels, 4, spec))
