"""Two levels: what the laws of exchanges cannot say. Four ranks are two machines of two."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.exchanges import EXEMPT, SHAPES, STEPS, Row, exact_mean, grid, inputs, virtually
from helpers.models import digest, mlp
from helpers.training import MANY_BUCKETS, assert_replicas_equal, loss_of
from helpers.world import run_world
from thinwire.core import parts
from thinwire.core.layout import Layout
from thinwire.reducer import Reducer

WORKERS = 4


def levels(**options):
    inner, outer = grid(2)
    return tw.Hierarchical(inner=inner, outer=outer, **options)


def reducer(spec, exchange, **options):
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    return Reducer(tensors, spec, dist.group.WORLD, exchange=exchange, exempt=EXEMPT, **options)


# -- who has what ------------------------------------------------------------------------------------------------------


def test_tensors_are_dealt_whole_or_by_rows_in_nearly_equal_shares():
    tensors = {"a": torch.empty(10, 10), "b": torch.empty(7, 100), "c": torch.empty(30), "d": torch.empty(())}
    dealt = parts.deal(tensors, owners=3, whole=300)
    assert [(piece.name, piece.start, piece.shape, piece.owner) for piece in dealt] == [
        ("a", 0, (10, 10), 0), ("b[0:2]", 0, (2, 100), 1), ("b[2:4]", 200, (2, 100), 2), ("b[4:7]", 400, (3, 100), 0),
        ("c", 0, (30,), 1), ("d", 0, (), 2),
    ]  # fmt: skip
    assert [piece.name for piece in parts.deal(tensors, owners=1, whole=10)] == ["a", "b", "c", "d"]


def test_exact_tensors_are_counted_apart():
    tensors = {"a": torch.empty(10, 10), "bias": torch.empty(10), "b": torch.empty(10, 10)}
    owners = {piece.name: piece.owner for piece in parts.deal(tensors, 2, 1000, exact=("bias",))}
    assert owners == {"a": 0, "bias": 0, "b": 1}


def test_pieces_are_found_in_a_buffer():
    layout = Layout.of([("v", (2, 3)), ("w", (4, 2))])
    own = [parts.rows("v", (2, 3), 1, 2), parts.rows("w", (4, 2), 0, 1), parts.rows("w", (4, 2), 3, 4)]
    selection = parts.select(layout, own)
    assert selection.runs == ((3, 8), (12, 14))
    assert selection.layout.names == ("v[1:2]", "w[0:1]", "w[3:4]")
    assert selection.gather(torch.arange(14.0), torch.empty(7)).tolist() == [3, 4, 5, 6, 7, 12, 13]


# -- what travels ------------------------------------------------------------------------------------------------------


def _sent(specs):
    found = {}
    for spec in specs:
        with reducer(spec, levels()) as each:
            for step in range(STEPS):
                each.reduce(inputs(step, dist.get_rank()))
            found[spec] = each.stats()
    return found


def test_a_machine_sends_and_remembers_what_one_flat_worker_would():
    """So over thin links it sends half of what its two workers would by themselves, and each remembers a half."""
    specs = ["signsgd", "fp16", "powersgd(factor_rank=1)"]
    ranks = run_world(_sent, WORKERS, specs)
    for spec in specs:
        machines = [[ranks[rank][spec] for rank in machine] for machine in ((0, 1), (2, 3))]
        flat = virtually(Row("two flat workers", workers=2), spec, "auto")
        remembered = sum(tensor.nbytes for tensor in flat.memories[0].values())
        for machine in machines:
            assert sum(each["bytes_sent_outside"] for each in machine) == pytest.approx(flat.bytes_sent, rel=0.01)
            assert sum(each["memory_bytes"] for each in machine) == remembered
            for each in machine:
                assert each["bytes_sent"] == each["bytes_sent_inside"] + each["bytes_sent_outside"]


def _over_links(links):
    found = []
    for link in links:
        inner, outer = grid(1)
        with reducer("signsgd", tw.Hierarchical(inner=inner, outer=outer, link=link)) as each:
            each.reduce(inputs(0, dist.get_rank()))
            found.append(each.stats()["bytes_sent_outside"])
    inner, outer = grid(1)
    own = (0.1 * dist.get_rank(), 1e9)
    with pytest.raises(ValueError, match="link between machines"):
        reducer("signsgd", tw.Hierarchical(inner=inner, outer=outer, link=own))
    return found


def test_a_known_link_between_machines_decides_the_route_and_all_must_know_the_same():
    late, near = zip(*run_world(_over_links, 3, [(1.0, 1e9), (0.0, 1e9)]), strict=True)
    assert sum(late) > sum(near), "a gather sends more, and has no first shot to wait for"


def _inside(codecs):
    found = {}
    for codec in codecs:
        exchange = levels(inside=codec, whole=1000)
        with reducer("fp32", exchange) as each:
            found[codec] = each.reduce(inputs(0, dist.get_rank())), each.stats()["bytes_sent_inside"]
    return found


def test_inside_may_be_narrower_and_exempt_tensors_are_exact_all_the_same():
    ranks = run_world(_inside, WORKERS, ["fp32", "bf16", "qsgd(bits=8)"])
    right = exact_mean(0, WORKERS)
    for codec, most in (("fp32", 1e-6), ("bf16", 1e-2), ("qsgd(bits=8)", 3e-2)):
        for mean, _ in (rank[codec] for rank in ranks):
            assert all(torch.equal(mean[name], ranks[0][codec][0][name]) for name in SHAPES)
            assert (mean["exact"] - right["exact"]).abs().max() < 1e-6
            assert (mean["w"] - right["w"]).norm() < most * right["w"].norm(), codec
    assert ranks[0]["bf16"][1] < 0.7 * ranks[0]["fp32"][1]
    assert ranks[0]["qsgd(bits=8)"][1] < ranks[0]["bf16"][1]


def _of_dtype(dtypes):
    found = {}
    for dtype in dtypes:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in SHAPES.items()}
        exchange = levels(inside="fp64", whole=1000)
        with Reducer(tensors, "fp64", dist.group.WORLD, exchange=exchange) as each:
            given = {name: tensor.to(dtype) for name, tensor in inputs(0, dist.get_rank()).items()}
            found[dtype] = each.reduce(given), each.stats()
    return found


def test_gradients_of_any_dtype_stay_what_they_are():
    """Added in float32 at least, sent in their own bytes."""
    ranks = run_world(_of_dtype, WORKERS, [torch.float64, torch.bfloat16])
    for dtype, most in ((torch.float64, 1e-15), (torch.bfloat16, 1e-2)):
        given = [{name: tensor.to(dtype).double() for name, tensor in inputs(0, rank).items()} for rank in range(4)]
        for mean, stats in (rank[dtype] for rank in ranks):
            assert mean["w"].dtype is dtype
            right = sum(each["w"] for each in given) / 4
            assert (mean["w"].double() - right).norm() < most * right.norm()
            assert stats["bytes_sent_outside"] < 1.1 * stats["bytes_dense"] / 2


def _poisoned(specs):
    found = {}
    for spec in specs:
        with reducer(spec, levels(whole=1000), feedback=True) as each:
            each.reduce(inputs(0, dist.get_rank()))
            before = {key: tensor.clone() for key, tensor in each.memory.items() if key[0].startswith("w")}
            given = inputs(1, dist.get_rank())
            if dist.get_rank() == 3:
                given["w"][:] = torch.nan
            seen = each.reduce(given)["w"]
            after = {key: tensor.clone() for key, tensor in each.memory.items() if key[0].startswith("w")}
            clean = [each.reduce(inputs(step, dist.get_rank()))["w"] for step in (2, 3)]
            owed = {key: tensor.clone() for key, tensor in each.memory.items() if key[0].startswith("w")}
            found[spec] = seen, before, after, clean, owed
    return found


def test_nan_on_one_rank_reaches_all_and_stays_nowhere():
    """And around it, what came and what is still owed make up what was given: nothing is lost between the levels."""
    specs = ["qsgd(bits=2)", "topk(density=0.1)", "powersgd(factor_rank=1)", "thc"]
    ranks = run_world(_poisoned, WORKERS, specs)
    rows = {piece.name: piece for piece in parts.deal({n: torch.empty(s) for n, s in SHAPES.items()}, 2, 1000, EXEMPT)}
    for spec in specs:
        for seen, before, after, clean, _ in (rank[spec] for rank in ranks):
            assert not seen.isfinite().all()
            assert all(torch.equal(before[key], after[key]) for key in before if key[1] == "residual")
            assert all(torch.equal(mine, other) for mine, other in zip(clean, ranks[0][spec][3], strict=True))
        came = sum(ranks[0][spec][3]).double()
        for rank in ranks:
            _, _, after, _, owed = rank[spec]
            for (name, key), residual in owed.items():
                if key == "residual":
                    piece = rows[name]
                    change = (residual - after[name, key]).double() / 2  # of two machines
                    came.view(-1)[piece.start : piece.start + piece.numel] += change.view(-1)
        exact = sum(exact_mean(step, WORKERS)["w"] for step in (2, 3))
        assert (came - exact).abs().max() < 1e-5 * exact.abs().max(), spec


# -- over DDP ----------------------------------------------------------------------------------------------------------


def _train(spec, whole, steps):
    """Many buckets, in which some workers of a machine have nothing and others ask twice."""
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tw.attach(model, spec, exchange=levels(whole=whole)) as wire:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return digest(model), wire.stats()["memory_bytes"]


@pytest.mark.parametrize("whole", [1 << 20, 500])
@pytest.mark.parametrize("spec", ["powersgd(factor_rank=1)", "fp32"])
def test_ddp_trains_over_two_levels(spec, whole):
    ranks = run_world(_train, WORKERS, spec, whole, 6)
    assert_replicas_equal([weights for weights, _ in ranks])


class Branched(torch.nn.Module):
    """A layer that is used in even steps only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(20, 64), torch.nn.Linear(20, 64)

    def forward(self, x, even):
        return self.first(x) + self.second(x) if even else self.first(x)


def _unused():
    model = DDP(Branched(), find_unused_parameters=True)
    owed = []
    with tw.attach(model, "signsgd", exchange=levels(whole=500)) as wire:
        for step in range(4):
            model.zero_grad()
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(x, step % 2 == 0).square().mean().backward()
            kept = {key: tensor.clone() for key, tensor in wire.memory.items()}
            owed.append({key: tensor for key, tensor in kept.items() if key[0].startswith("second.weight")})
    return owed


def test_nothing_is_paid_for_what_no_rank_used():
    for owed in run_world(_unused, WORKERS):
        assert owed[0] and all(torch.equal(owed[1][key], owed[0][key]) for key in owed[0])
        assert not any(torch.equal(owed[2][key], owed[0][key]) for key in owed[0])


def _steered():
    with reducer("qsgd(bits=4)", levels(), controller="uniform(interval=1, seed=3)") as each:
        chosen = []
        for step in range(5):
            each.reduce(inputs(step, dist.get_rank()))
            each.steering.settle()
            chosen.append(each.level)
    return chosen


def test_a_controller_decides_for_both_levels_alike():
    ranks = run_world(_steered, WORKERS)
    assert all(chosen == ranks[0] for chosen in ranks) and len(set(ranks[0])) > 1


# -- another number of machines ----------------------------------------------------------------------------------------


def _saved(spec):
    with reducer(spec, levels(whole=1000)) as each:
        each.reduce(inputs(0, dist.get_rank()))
        return each.state_dict()


def _loaded(spec, states, local, whole):
    inner, outer = grid(local)
    with reducer(spec, tw.Hierarchical(inner=inner, outer=outer, whole=whole)) as each:
        each.load_state_dict(tw.checkpoint.merge(states))
        return {key: tensor.clone() for key, tensor in each.memory.items() if key[1] == "residual"}


@pytest.mark.parametrize("spec", ["signsgd", "powersgd(factor_rank=1)"])
def test_another_number_of_machines_takes_what_is_owed(spec):
    states = run_world(_saved, WORKERS, spec)
    (one, other) = run_world(_loaded, 2, spec, states, 2, 1000)
    for place, taken in enumerate((one, other)):
        assert taken
        for (name, key), residual in taken.items():
            old = [states[rank][tw.checkpoint.part(rank)][name][key] for rank in (place, place + 2)]
            torch.testing.assert_close(residual, (old[0] + old[1]) / 2)


def test_other_parts_are_refused():
    """What is remembered belongs to pieces of tensors, which another number of workers on a machine cuts otherwise."""
    states = run_world(_saved, WORKERS, "signsgd")
    with pytest.raises(RuntimeError, match=r"residuals saved in worker000. do not fit"):
        run_world(_loaded, 2, "signsgd", states, 1, 1000)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def _refused():
    inner, outer = grid(2)
    told = []
    for options in ({"inside": "signsgd"}, {"inside": "powersgd"}, {"whole": 0}, {"route": "train"}):
        with pytest.raises(ValueError) as error:
            tw.Hierarchical(inner=inner, outer=outer, **options)
        told.append(str(error.value))
    with pytest.raises(ValueError) as error:
        reducer("qsgd", tw.Hierarchical(inner=inner, outer=inner))
    told.append(str(error.value))
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(ValueError) as error:
        tw.Hierarchical.of_nodes()
    told.append(str(error.value))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with reducer("fp32", tw.Hierarchical.of_nodes()) as each:
        mean = each.reduce(inputs(0, dist.get_rank()))
    return told, mean


def test_mistakes_are_told_to_all():
    for told, mean in run_world(_refused, WORKERS):
        assert "inside must be right on average" in told[0]
        assert "not one message" in told[1]
        assert "whole must be a number of elements" in told[2]
        assert "route must be one of" in told[3]
        assert "must make a grid of the model's ranks [0, 1, 2, 3]" in told[4]
        assert "LOCAL_WORLD_SIZE, or local=, must divide the 4 ranks, got 3" in told[5]
        torch.testing.assert_close(mean["w"].double(), exact_mean(0, WORKERS)["w"], rtol=1e-6, atol=1e-6)
