"""Laws of every mixer, and the answers in the corner cases, on virtual workers."""

import math

import pytest
import torch

from thinwire.gossip import GossipSimulation, PowerGossip, graphs, mixers

MIXERS = {
    "dpsgd": ["dpsgd"],
    "powergossip": ["powergossip", "powergossip(factor_rank=3, iterations=2)", "powergossip(warm=False)"],
    "choco": ["choco(codec='qsgd(bits=6)', step=0.5)", "choco(codec='fp16')"],
    "deepsqueeze": ["deepsqueeze(codec='qsgd(bits=8)', step=0.5)"],
}
ALL = [spec for specs in MIXERS.values() for spec in specs]
SHAPES = {"conv": (6, 3, 2, 2), "bias": (6,), "head": (4, 11), "scale": ()}


def replicas(count, *, shapes=SHAPES, dtype=torch.float64, seed=0, common=0.0):
    generator = torch.Generator().manual_seed(seed)
    base = {name: torch.randn(shape, dtype=dtype, generator=generator) for name, shape in shapes.items()}
    return [
        {
            name: common * base[name] + torch.randn(shape, dtype=dtype, generator=generator)
            for name, shape in shapes.items()
        }
        for _ in range(count)
    ]


def bits(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_every_mixer_is_tested_here():
    assert set(mixers.registry()) == set(MIXERS)


@pytest.mark.parametrize("spec", ALL)
def test_mean_stays_and_disagreement_falls(spec):
    xs = replicas(6)
    gossip = GossipSimulation(xs, graphs.ring(6), spec)
    mean, distance = gossip.mean(), gossip.consensus()
    for _ in range(80):
        gossip.mix()
    drift = max(float((gossip.mean()[name] - mean[name]).abs().max()) for name in mean)
    assert drift < 1e-12
    assert gossip.consensus() < 0.05 * distance


@pytest.mark.parametrize("spec", [spec for spec in ALL if "deepsqueeze" not in spec])
def test_equal_replicas_stay_equal_to_the_bit(spec):
    x = replicas(1)[0]
    xs = [bits(x) for _ in range(4)]
    gossip = GossipSimulation(xs, graphs.complete(4), spec, equal="choco" in spec)
    for _ in range(5):
        gossip.mix()
    assert all(same(x, other) for other in xs)


@pytest.mark.parametrize("spec", ALL)
def test_what_the_ends_of_an_edge_share_is_bit_identical(spec):
    xs = replicas(5, dtype=torch.float32)
    gossip = GossipSimulation(xs, graphs.ring(5), spec)
    for _ in range(7):
        gossip.mix()
        for lo, hi in gossip.graph.at(0).edges:
            a, b = gossip.nodes[lo], gossip.nodes[hi]
            if isinstance(gossip.mixer, PowerGossip):
                shared = [(a.edge(hi), b.edge(lo))]
            else:  # estimates: what a node thinks of itself is what its neighbour thinks of it
                shared = [(a.edge(hi), b.own), (a.own, b.edge(lo))] if gossip.mixer.name == "choco" else []
            for mine, theirs in shared:
                found = dict(mine.items())
                assert found
                assert all(torch.equal(tensor, theirs[key]) for key, tensor in found.items())


@pytest.mark.parametrize("spec", ALL)
def test_spec_text_round_trip(spec):
    mixer = mixers.parse(spec)
    assert mixers.parse(mixer.spec) == mixer


@pytest.mark.parametrize("spec", ALL)
def test_same_seed_same_bits(spec):
    runs = []
    for _ in range(2):
        xs = replicas(4, dtype=torch.float32)
        gossip = GossipSimulation(xs, graphs.ring(4), spec, seed=3)
        for _ in range(4):
            gossip.mix()
        runs.append(xs)
    assert all(same(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_replica_that_is_not_finite_infects_nobody_and_leaves_no_trace(spec, bad):
    xs = replicas(5)
    gossip = GossipSimulation(xs, graphs.ring(5), spec)
    gossip.mix()
    healthy = bits(xs[2])
    xs[2]["head"][1, 3] = bad
    for _ in range(3):
        gossip.mix()
    assert all(t.isfinite().all() for i in (0, 1, 3, 4) for t in xs[i].values())
    for name, tensor in xs[2].items():  # the user restores the replica: all is well again
        tensor.copy_(healthy[name])
    before = gossip.consensus()
    for _ in range(60):
        gossip.mix()
    assert gossip.consensus() < 0.05 * before


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize(
    "shapes",
    [
        {"a": (7,), "b": (1,)},
        {"row": (1, 9)},
        {"column": (9, 1)},
        {"dot": (1, 1)},
        {"scalar": ()},
        {"none": (0, 3), "b": (2,)},
    ],
    ids=lambda shapes: "+".join(shapes),
)
def test_odd_shapes_reach_the_mean(spec, shapes):
    xs = replicas(3, shapes=shapes)
    gossip = GossipSimulation(xs, graphs.complete(3), spec)
    mean, distance = gossip.mean(), gossip.consensus()
    for _ in range(40):
        gossip.mix()
    assert gossip.consensus() < 1e-2 * distance
    assert all(torch.allclose(gossip.mean()[name], mean[name], atol=1e-12) for name in mean)


@pytest.mark.parametrize("spec", ["dpsgd", "powergossip", "powergossip(factor_rank=50)"])
def test_one_dimensional_models_are_averaged_exactly(spec):
    xs = replicas(3, shapes={"a": (7,), "b": (1,)})
    gossip = GossipSimulation(xs, graphs.complete(3), spec)
    mean = gossip.mean()
    gossip.mix()
    assert all(torch.allclose(x[name], mean[name], atol=1e-14) for x in xs for name in mean)


def test_full_rank_powergossip_is_exact_gossip_every_time():
    xs, ys = replicas(4, shapes={"m": (5, 8)}), replicas(4, shapes={"m": (5, 8)})
    power, exact = (
        GossipSimulation(xs, graphs.ring(4), "powergossip(factor_rank=99)"),
        GossipSimulation(ys, graphs.ring(4), "dpsgd"),
    )
    power.mix()  # one product with a random 5-dimensional basis of 8 dimensions: not yet everything
    ys[:] = [y | bits(x) for x, y in zip(xs, ys, strict=True)]
    exact = GossipSimulation(ys, graphs.ring(4), "dpsgd")
    power.mix()  # the left basis has all 5 dimensions: the whole difference
    exact.mix()
    assert all(torch.allclose(x["m"], y["m"], atol=1e-13) for x, y in zip(xs, ys, strict=True))


def test_powergossip_leaves_agreement_when_replicas_part_again():
    """Replicas agree (P and Q vanish), then part outside the first row and column."""
    x = torch.randn(6, 5, dtype=torch.float64)
    xs = [{"m": x.clone()} for _ in range(2)]
    gossip = GossipSimulation(xs, graphs.ring(2), "powergossip")
    for _ in range(4):
        gossip.mix()
    xs[0]["m"][3, 2] += 1
    for _ in range(4):
        gossip.mix()
    assert torch.allclose(xs[0]["m"], xs[1]["m"], atol=1e-12)


def test_powergossip_with_tiny_differences():
    x = torch.randn(6, 5)
    xs = [{"m": x * 0}, {"m": x * 1e-30}]
    gossip = GossipSimulation(xs, graphs.ring(2), "powergossip(factor_rank=5)")
    for _ in range(4):
        gossip.mix()
    assert torch.allclose(xs[0]["m"] * 1e30, x / 2, atol=1e-4)
    assert torch.allclose(xs[1]["m"] * 1e30, x / 2, atol=1e-4)


def test_powergossip_bytes_alternate_rows_and_columns():
    xs = replicas(3, shapes={"m": (7, 4), "b": (5,)}, dtype=torch.float32)
    gossip = GossipSimulation(xs, graphs.ring(3), "powergossip(factor_rank=2)")
    sent = []
    for _ in range(3):
        before = gossip.bytes_sent
        gossip.mix()
        sent.append((gossip.bytes_sent - before) // 6)  # three nodes, two neighbours each
    assert sent == [4 * (5 + 2 * 7), 4 * (5 + 2 * 4), 4 * (5 + 2 * 7)]


@pytest.mark.parametrize("spec", ["dpsgd", "powergossip", "deepsqueeze(codec='qsgd(bits=8)', step=0.5)"])
def test_a_graph_that_changes_every_step(spec):
    def matching(
        step,
    ):  # pairs (0 1)(2 3), then (1 2)(3 0): no single step is connected, the two together are
        weights = torch.eye(4).numpy() / 2
        for a, b in [(0, 1), (2, 3)] if step % 2 else [(1, 2), (3, 0)]:
            weights[a, b] = weights[b, a] = 0.5
        return weights

    xs = replicas(4)
    gossip = GossipSimulation(xs, matching, spec)
    distance, mean = gossip.consensus(), gossip.mean()
    for _ in range(80):
        gossip.mix()
    assert gossip.consensus() < 0.05 * distance
    assert all(torch.allclose(gossip.mean()[name], mean[name], atol=1e-12) for name in mean)


def test_choco_refuses_a_graph_that_changes():
    with pytest.raises(ValueError, match="choco needs the same neighbours"):
        GossipSimulation(replicas(4), lambda step: graphs.ring(4), "choco")


def test_choco_starts_at_the_common_weights_when_told_so():
    x = replicas(1, common=100.0)[0]
    gossip = GossipSimulation([bits(x) for _ in range(4)], graphs.ring(4), "choco", equal=True)
    gossip.mix()
    assert gossip.bytes_sent == 0, "equal replicas have nothing to tell"
    gossip.mix()
    estimate = gossip.nodes[0].edge(1)
    assert all(torch.equal(estimate[name, "estimate"], x[name]) for name in x)


def test_deepsqueeze_residual_is_what_the_messages_lost():
    xs = replicas(2, dtype=torch.float32)
    gossip = GossipSimulation(xs, graphs.ring(2), "deepsqueeze(codec='qsgd(bits=2)', step=0.1)")
    for _ in range(3):
        gossip.mix()
    residual = gossip.nodes[0].own.flat("residual", gossip.nodes[0].layout)
    assert 0 < residual.abs().max() < 10


@pytest.mark.parametrize("spec", ALL)
def test_state_round_trip_continues_with_the_same_bits(spec, tmp_path):
    xs = replicas(4, dtype=torch.float32)
    gossip = GossipSimulation(xs, graphs.ring(4), spec, seed=5)
    for _ in range(3):
        gossip.mix()
    torch.save([node.state_dict() for node in gossip.nodes], tmp_path / "state.pt")
    ys = [bits(x) for x in xs]
    again = GossipSimulation(ys, graphs.ring(4), spec)
    for node, state in zip(again.nodes, torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        node.load_state_dict(state)
    for _ in range(3):
        gossip.mix()
        again.mix()
    assert all(same(x, y) for x, y in zip(xs, ys, strict=True))


def test_state_of_another_mixer_is_refused():
    a = GossipSimulation(replicas(2), graphs.ring(2), "powergossip").nodes[0]
    b = GossipSimulation(replicas(2), graphs.ring(2), "powergossip(factor_rank=2)").nodes[0]
    with pytest.raises(ValueError, match="factor_rank=2"):
        b.load_state_dict(a.state_dict())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("powergossip(factor_rank=0)", "factor_rank must be"),
        ("powergossip(iterations=1.5)", "iterations must be"),
        ("powergossip(step=2.5)", "step must be"),
        ("choco(step=0)", "step must be"),
        ("choco(codec='powersgd')", "conversation of the whole group, not one message"),
        ("choco(codec='nope')", "unknown scheme"),
        ("deepsqueeze(step=-1)", "step must be"),
        ("powergosip", "did you mean 'powergossip'"),
        ("powergossip(rank=1)", "no option 'rank'"),
        ("powergossip(1)", "options by name"),
        ("powergossip(", "cannot read"),
        (3, "spec text"),
    ],
)
def test_wrong_specs_are_refused(spec, says):
    with pytest.raises(ValueError, match=says):
        mixers.parse(spec)


def test_wrong_replicas_are_refused():
    with pytest.raises(ValueError, match="does not fit 3 replicas"):
        GossipSimulation(replicas(3), graphs.ring(4), "dpsgd")
    with pytest.raises(ValueError, match="floating-point"):
        GossipSimulation([{"x": torch.arange(3)}] * 2, graphs.ring(2), "dpsgd")
    with pytest.raises(ValueError, match="no trainable"):
        GossipSimulation([torch.nn.ReLU()] * 2, graphs.ring(2), "dpsgd")


def test_narrow_weights_are_mixed_in_float32():
    xs = [{"m": torch.full((2, 3), value, dtype=torch.bfloat16)} for value in (1.0, 2.0)]
    gossip = GossipSimulation(xs, graphs.ring(2), "dpsgd")
    gossip.mix()
    assert gossip.bytes_sent == 2 * 6 * 4
    assert all((x["m"] == 1.5).all() and x["m"].dtype == torch.bfloat16 for x in xs)


def test_a_wrong_size_from_a_neighbour_is_an_error():
    gossip = GossipSimulation(replicas(2), graphs.ring(2), "powergossip")
    talk = gossip.nodes[0].mixing({1: 0.5})
    message = next(talk)[1]
    with pytest.raises(ValueError, match="a neighbour sent"):
        talk.send({1: message[:-8]})


@pytest.mark.parametrize("spec", ALL)
def test_a_neighbour_missing_from_an_answer_is_left_out(spec):
    """One end of a path of three falls silent: the other two reach their own mean."""
    xs = replicas(3)
    gossip = GossipSimulation(xs, graphs.of([[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]), spec)
    graph = gossip.graph.at(0)
    mean = (xs[0]["head"] + xs[1]["head"]) / 2
    for node, x in zip(gossip.nodes, xs, strict=True):
        node.load(x)
    for _ in range(60):
        talks = [gossip.nodes[i].mixing(graph.neighbours(i)) for i in (0, 1)]
        said = [next(talk) for talk in talks]
        while said[0] is not None:
            heard = [{1: said[1][0].clone()}, {0: said[0][1].clone()}]
            said = [_next(talk, answer) for talk, answer in zip(talks, heard, strict=True)]
    for node in gossip.nodes[:2]:
        assert torch.allclose(node.views["head"], mean, atol=0.05)


def _next(talk, answer):
    try:
        return talk.send(answer)
    except StopIteration:
        return None
