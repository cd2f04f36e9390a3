"""A resumed run continues with the same bits; another number of workers loses nothing."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import digest, mlp
from helpers.specs import BUCKETWISE, every_spec
from helpers.training import MANY_BUCKETS, assert_replicas_equal, loss_of
from helpers.world import run_world
from thinwire import checkpoint
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory


def run(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def start(bucket_cap_mb, spec, feedback):
    # DDP rebuilds its buckets after a start's first step, unless it looks for unused parameters; schemes that choose
    # over a bucket choose otherwise in other buckets.
    model = DDP(mlp(), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=spec.startswith(BUCKETWISE))
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        tw.attach(model, spec, feedback=feedback),
    )


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _file(folder, spec):
    return f"{folder}/{every_spec().index(spec)}-{dist.get_rank()}.pt"


def _save_and_go_on(feedback, folder):
    """{spec: weights, steps} in the end, of runs that saved everything half-way."""
    ends = {}
    for spec in every_spec():
        model, optimizer, wire = start(MANY_BUCKETS, spec, feedback)
        run(model, optimizer, range(4))
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "wire": wire.state_dict(),
        }
        torch.save(state, _file(folder, spec))
        run(model, optimizer, range(4, 9))
        wire.close()
        ends[spec] = digest(model), wire.stats()["steps"]
    return ends


def _resume(feedback, folder, bucket_cap_mb, specs):
    ends = {}
    for spec in specs:
        model, optimizer, wire = start(bucket_cap_mb, spec, feedback)
        state = torch.load(_file(folder, spec), weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        wire.load_state_dict(state["wire"])
        run(model, optimizer, range(4, 9))
        wire.close()
        ends[spec] = digest(model), wire.stats()["steps"]
    return ends


@pytest.mark.parametrize("feedback", ["auto", True])
def test_resume_is_bit_identical_in_new_processes_and_other_buckets(feedback, tmp_path):
    """Two ranks, because a float sum of more depends on where in its bucket a tensor lies (all-reduce slices)."""
    gone_on = run_world(_save_and_go_on, 2, feedback, str(tmp_path))
    free = [spec for spec in every_spec() if not spec.startswith(BUCKETWISE)]
    for cap, specs in ((MANY_BUCKETS, every_spec()), (25, free)):
        resumed = run_world(_resume, 2, feedback, str(tmp_path), cap, specs)
        for each, uninterrupted in zip(resumed, gone_on, strict=True):
            for spec in specs:
                (weights, steps), (expected, expected_steps) = each[spec], uninterrupted[spec]
                assert steps == expected_steps == 9
                assert all(torch.equal(*both) for both in zip(weights, expected, strict=True)), spec


def _distributed_checkpoint(folder):
    model, optimizer, wire = start(MANY_BUCKETS, "qsgd", True)
    run(model, optimizer, range(3))
    dcp.save({"wire": wire.state_dict()}, checkpoint_id=folder)
    residual = wire.memory["0.weight", "residual"].clone()
    wire.close()

    fresh = tw.attach(model, "qsgd", feedback=True)
    state = {"wire": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state["wire"])
    assert torch.equal(fresh.memory["0.weight", "residual"], residual)
    assert fresh.step == 3
    fresh.close()
    return residual


def test_torch_distributed_checkpoint_gives_each_rank_its_own_residual(tmp_path):
    zero, one = run_world(_distributed_checkpoint, 2, str(tmp_path / "dcp"))
    assert not torch.equal(zero, one)


def _distributed_checkpoint_elsewhere(folder, old_workers):
    _, _, wire = start(MANY_BUCKETS, "qsgd", True)
    state = {"wire": wire.state_dict(workers=old_workers)}
    # No more than this rank will take: a state of a thousand workers must fit, too.
    parts = [key for key in state["wire"] if key.startswith("worker0")]
    assert parts == [checkpoint.part(old) for old in range(dist.get_rank(), old_workers, dist.get_world_size())]
    dcp.load(state, checkpoint_id=folder)
    wire.load_state_dict(state["wire"])
    return wire.memory["0.weight", "residual"].clone()


def test_torch_distributed_checkpoint_at_another_size(tmp_path):
    saved = run_world(_distributed_checkpoint, 2, str(tmp_path / "dcp"))
    loaded = run_world(_distributed_checkpoint_elsewhere, 3, str(tmp_path / "dcp"), 2)
    torch.testing.assert_close(sum(loaded) / 3, sum(saved) / 2)


def _saved(spec):
    model, optimizer, wire = start(MANY_BUCKETS, spec, True)
    run(model, optimizer, range(3))
    state = copy.deepcopy(wire.state_dict())
    wire.close()
    return through_a_file(state)


def _load_merged(spec, merged):
    model, optimizer, wire = start(MANY_BUCKETS, spec, True)
    wire.load_state_dict(merged)
    residuals = {name: t.clone() for (name, key), t in wire.memory.items() if key == "residual"}
    run(model, optimizer, range(3, 6))
    wire.close()
    return residuals, digest(model)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_other_world_sizes_keep_what_the_residuals_owe(workers):
    """The next mean owes sum(e_i)/n; that, not the bare sum, is what must not change with n."""
    states = run_world(_saved, 3, "qsgd")
    results = run_world(_load_merged, workers, "qsgd", checkpoint.merge(states))
    for name, shape in ((n, p.shape) for n, p in mlp().named_parameters()):
        if name in results[0][0]:
            owed = sum(state[checkpoint.part(i)][name]["residual"] for i, state in enumerate(states)) / 3
            assert owed.shape == shape and owed.abs().max() > 0
            torch.testing.assert_close(sum(residuals[name] for residuals, _ in results) / workers, owed)
    assert_replicas_equal([weights for _, weights in results])


def _refusals(states):
    model, optimizer, wire = start(MANY_BUCKETS, "qsgd", True)
    run(model, optimizer, range(2))
    before = copy.deepcopy(wire.state_dict())
    own, other = checkpoint.part(dist.get_rank()), states[1 - dist.get_rank()]
    for bad, message in (
        (other, "needs its own part, worker000"),
        (before | {"scheme": "fp16"}, "saved under 'fp16'"),
        (before | {"seed": 7}, "saved under seed 7"),
        (before | {"workers": 3}, "(?s)parts of all 3 are needed; missing.*load_state_dict.*checkpoint.merge"),
        (before | {checkpoint.part(dist.get_rank()): {}}, "does not fit: missing .*2.weight.*residual"),
        (before | {own: before[own] | {"gone": {"residual": torch.zeros(3)}}}, "unknown .*gone.*exempt="),
        (before | {own: before[own] | {"2.weight": {"residual": torch.zeros(3)}}}, "shape"),
        (before | {own: {"2.weight": 3}}, "must hold dense tensors"),
        (before | {own: before[own] | {3: before[own]["2.weight"]}}, "must hold dense tensors by parameter"),
        (before | {"steering": {"controller": "mqgrad"}}, "a controller, 'mqgrad', and this wire has none"),
        (before | {"step": "x"}, "'step' cannot be str"),
        (before | {"ledger": {"bytes_sent": "x"}}, "must be numbers"),
        (before | {"exchange": {"server0000": {}}}, "only a parameter server"),
        (before | {"workers": torch.ones(3)}, "'workers' cannot be Tensor"),
        (before | {"apart": []}, "'apart' cannot be list"),
        (before | {"apart": {own: {"ledger": 3}}}, "'ledger' cannot be int"),
        (before | {"apart": {own: {"seed": 7, 5: None}}}, "saved under seed 7"),
        ({key: before[key] for key in ("format", "scheme", "seed")}, "lacks workers, step, shared, ledger"),
        ({"format": 99}, "not a thinwire state"),
        ([], "not a thinwire state"),
    ):
        with pytest.raises(ValueError, match=message):
            wire.load_state_dict(bad)
    after = wire.state_dict()
    assert after["step"] == 2
    for name in before[own]:
        assert torch.equal(before[own][name]["residual"], after[own][name]["residual"])
    wire.close()
    return True


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    states = run_world(_saved, 2, "qsgd")
    assert run_world(_refusals, 2, states) == [True, True]
    with pytest.raises(ValueError, match="not of one run: step is 3 and 4"):
        checkpoint.merge([states[0], states[1] | {"step": 4}])


def _broken_learning():
    with tw.attach(DDP(mlp()), "qsgd", controller="mqgrad") as wire:
        saved = wire.state_dict()
        learnt = saved["steering"]["learnt"]
        for broken, message in (
            (3.0, "'steering' cannot be float"),
            (saved["steering"] | {"learnt": {}}, "cannot be read"),
            (saved["steering"] | {"learnt": learnt | {"last": 1.0}}, "cannot be read"),
        ):
            with pytest.raises(ValueError, match=message):
                wire.load_state_dict(saved | {"steering": broken})
    return True


def test_what_a_controller_learnt_is_read_or_refused():
    assert run_world(_broken_learning, 2) == [True, True]


def _forgetful(states, spec, options):
    """Residuals that this wire has no place for, at the same and at another number of workers."""
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    with (
        tw.attach(model, spec, **options) as wire,
        pytest.raises(ValueError, match=r"(?s)not fit.*feedback= and exempt="),
    ):
        wire.load_state_dict(states[dist.get_rank()] if dist.get_world_size() == 2 else checkpoint.merge(states))
    return True


@pytest.mark.parametrize("options", [{"feedback": False}, {"exempt": ["*weight"], "feedback": True}], ids=str)
def test_what_is_owed_is_never_dropped_without_a_word(options):
    states = run_world(_saved, 2, "qsgd")
    assert all(run_world(_forgetful, 2, states, "qsgd", options))
    assert all(run_world(_forgetful, 1, states, "qsgd", options))


SIZES = (("a", 3), ("b", 2))


def test_a_residual_of_another_dtype_is_taken_after_the_first_step():
    layout, memory = Layout.of([(name, (numel,)) for name, numel in SIZES]), Memory()
    for name, numel in SIZES:
        memory.add(name, {"residual": torch.zeros(numel)})
    flat = memory.flat("residual", layout)
    memory.load_state_dict(
        {name: {"residual": torch.full((numel,), 7.0, dtype=torch.bfloat16)} for name, numel in SIZES}
    )
    assert torch.equal(flat, torch.full((5,), 7.0)) and memory.flat("residual", layout) is flat


def test_a_state_of_before_an_option_was_there_is_of_the_same_scheme():
    assert checkpoint.in_full("topk(density=0.01, values='bf16')") == tw.scheme("topk(density=0.01)").spec
    assert checkpoint.in_full("topk(density=0.02)") != tw.scheme("topk(density=0.01)").spec
    assert checkpoint.in_full("what nobody knows") == "what nobody knows"
