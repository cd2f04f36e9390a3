"""The synchronous parameter server, held against AllReduce: the same bits, whoever adds."""

import functools
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import mlp
from helpers.specs import every_spec
from helpers.training import train
from helpers.world import run_world
from thinwire.core.scheme import Codec

STEPS = 3


def _both(servers, specs, downs):
    """{(spec, down): weights through the servers}, {(spec, route): weights by AllReduce}, on each worker.

    Nothing is exempt: an exempt tensor travels by a float sum, which would hide what else is the same to the bit.
    """
    served, reduced, stats = {}, {}, {}
    for spec in specs:
        for down in downs:
            role = tw.join(servers=servers, down=down, timeout_seconds=30)
            if role.serves:
                stats[spec, down] = role.serve()
                continue
            model = DDP(mlp(), process_group=role.workers, bucket_cap_mb=0.01)
            with tw.attach(model, spec, exchange=role.exchange, exempt=()) as wire:
                served[spec, down] = train(model, STEPS, worker=role.exchange.worker)
                stats[spec, down] = wire.stats()
        if not role.serves:
            codec = tw.scheme(spec)
            for route in ("gather", "two-shot") if isinstance(codec, Codec) and codec.grain else ("gather",):
                model = DDP(mlp(), process_group=role.workers, bucket_cap_mb=0.01)
                with tw.attach(model, spec, exchange=tw.AllReduce(route=route), exempt=()):
                    reduced[spec, route] = train(model, STEPS, worker=role.exchange.worker)
    return served, reduced, stats


@functools.cache
def worlds(workers, servers):
    return run_world(_both, servers + workers, servers, specs_of(workers, servers), ("fp32", "same"))


def specs_of(workers, servers):
    """All, or where that would take long one of every scheme."""
    every = every_spec()
    return every if (workers, servers) != (3, 2) else list({tw.scheme(spec).name: spec for spec in every}.values())


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def exact(spec):
    """Whether what the scheme asks for is the same to the bit whoever adds: payloads and integers, no float sums."""
    return tw.scheme(spec).rank_order or tw.scheme(spec).name == "regtopk" or "values='qsgd" in spec


LONGER = [(2, 2), (3, 1), (4, 1), (4, 2)]
SIZES = [(2, 1), (3, 2), *(pytest.param(*size, marks=pytest.mark.full) for size in LONGER)]


@pytest.mark.parametrize(("workers", "servers"), SIZES)
def test_an_exact_way_back_gives_what_all_reduce_gives(workers, servers):
    served, reduced, _ = worlds(workers, servers)[servers]
    for spec in specs_of(workers, servers):
        ours, theirs = served[spec, "fp32"], reduced[spec, "gather"]
        if workers == 2 or exact(spec):
            assert same(ours, theirs), spec
        else:  # all-reduce adds in an order of its own
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=5e-3, msg=spec)


@pytest.mark.parametrize(("workers", "servers"), SIZES)
def test_an_encoded_way_back_gives_what_a_two_shot_gives(workers, servers):
    """For codecs that work block by block, so that a cut changes nothing, and need no error memory on the way back."""
    served, reduced, _ = worlds(workers, servers)[servers]
    blockwise = [spec for spec, route in reduced if route == "two-shot" and tw.scheme(spec).name == "qsgd"]
    assert blockwise
    for spec in blockwise:
        assert same(served[spec, "same"], reduced[spec, "two-shot"]), spec


@pytest.mark.parametrize(("workers", "servers"), SIZES)
def test_replicas_are_bit_identical(workers, servers):
    first, *others = (served for served, _, _ in worlds(workers, servers)[servers:])
    for key, weights in first.items():
        assert all(same(weights, other[key]) for other in others), key


def _bytes(servers, spec, down):
    role = tw.join(servers=servers, down=down, timeout_seconds=30)
    if role.serves:
        return role.serve()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 256, bias=False), nn.Linear(256, 64, bias=False))
    model = DDP(net, process_group=role.workers)
    with tw.attach(model, spec, exchange=role.exchange) as wire:
        model(torch.randn(4, 64)).square().mean().backward()
        before = wire.stats()
        model(torch.randn(4, 64)).square().mean().backward()
        after = wire.stats()
    return {key: after[key] - before[key] for key in ("bytes_sent", "bytes_received")}


def test_bytes_up_are_the_codecs_bits_and_down_as_configured():
    entries = 64 * 256 * 2 + 256 * 256
    scales = 4 * entries // 1024
    frames = 1000  # headers, and the description of the regrouped bucket, once
    for down, bits in (("same", 4), ("fp16", 16), ("fp32", 32), ("qsgd(bits=8)", 8)):
        _, worker, _ = run_world(_bytes, 3, 1, "qsgd(bits=4)", down)
        up, back = worker["bytes_sent"], worker["bytes_received"]
        assert 0 <= up - (entries * 4 / 8 + scales) < frames, down
        assert 0 <= back - entries * bits / 8 <= frames + scales, down


DOCUMENTED = re.compile(r"^\| (\d+) \| (\d+) \| ([\d,]+) / ([\d,]+) \| ([\d,]+) / ([\d,]+) \|$", re.MULTILINE)


def traffic_table():
    """The rows of the table in docs/guide/parameter-server.md, as numbers."""
    page = Path(__file__).parents[2] / "docs" / "guide" / "parameter-server.md"
    return [tuple(int(cell.replace(",", "")) for cell in row) for row in DOCUMENTED.findall(page.read_text())]


def test_server_traffic_grows_with_the_workers_and_shrinks_with_the_servers():
    """Measured again, the traffic is what the table in the docs says, to the byte."""
    busiest = {}
    for workers, servers, up, down, taken, given in traffic_table():
        *served, worker = run_world(_bytes, workers + servers, servers, "qsgd(bits=4)", "same")[: servers + 1]
        assert (worker["bytes_sent"], worker["bytes_received"]) == (up, down)
        assert max((each["bytes_received"], each["bytes_sent"]) for each in served) == (taken, given)
        busiest[workers, servers] = taken + given
    assert sorted(busiest) == [(2, 1), (4, 1), (4, 2), (6, 2)]
    assert busiest[4, 1] == pytest.approx(2 * busiest[2, 1], rel=0.02)
    assert busiest[4, 2] < 0.75 * busiest[4, 1]
    assert busiest[6, 2] > 1.4 * busiest[4, 2]


class Counted(nn.Sequential):
    """With a buffer, which DDP broadcasts."""

    def __init__(self, net):
        super().__init__(net)
        self.register_buffer("steps", torch.zeros(1))


def _warnings():
    """What attach warns of: plain, with buffers, with unused parameters; and nothing where a lost worker stops all."""
    heard = []
    for on_failure in ("continue", "stop"):
        for net, options in ((mlp(), {}), (Counted(mlp()), {}), (mlp(), {"find_unused_parameters": True})):
            role = tw.join(servers=1, timeout_seconds=30, on_failure=on_failure)
            if role.serves:
                role.serve()
                continue
            model = DDP(net, process_group=role.workers, **options)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                tw.attach(model, "fp32", exchange=role.exchange).close()
            heard.append([str(each.message) for each in caught])
    return heard


def test_attach_warns_where_ddp_would_end_the_job_that_is_to_go_on():
    _, heard, _ = run_world(_warnings, 3)
    plain, buffers, unused, *stops = heard
    assert plain == [] and stops == [[], [], []]
    assert "broadcasts buffers" in buffers[0] and "a lost worker will end the job" in buffers[0]
    assert "looks for unused parameters" in unused[0] and len(unused) == len(buffers) == 1


def _mistakes():
    with pytest.raises(ValueError, match=r"1\.\.2 of 3 ranks, got 3"):
        tw.join(servers=3)
    with pytest.raises(ValueError, match="timeout_seconds must be positive"):
        tw.join(timeout_seconds=0)
    role = tw.join(servers=1, timeout_seconds=30)
    if role.serves:
        return role.serve()["workers"]
    with pytest.raises(ValueError, match=r"process_group=role\.workers"):
        role.exchange.open(torch.distributed.group.WORLD, tw.scheme("fp16"))
    with pytest.raises(ValueError, match="this rank trains"):
        role.serve()
    role.exchange.close()
    return None


def test_mistakes_raise_with_what_is_accepted():
    assert run_world(_mistakes, 3)[0] == 2.0
    with pytest.raises(ValueError, match="init_process_group"):
        tw.join()
