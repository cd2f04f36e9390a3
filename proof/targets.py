"""What `make fuzz` feeds: everything that reads bytes, text or state that others made.

A target makes an input of a generator of chance, and takes it. What it may raise is ValueError; it tells by its answer
whether it took the input.
"""

from __future__ import annotations

import functools
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from proof.mutate import changed_bytes, changed_state, changed_text
from thinwire import control, schemes
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec
from thinwire.exchange.server import frames, operations, weights
from thinwire.gossip import mixers
from thinwire.gossip.news import News
from thinwire.gossip.node import Node
from thinwire.reducer import Reducer

SHAPES = [
    [("a", (5,))],
    [("a", (8, 8)), ("b", (1,)), ("c", (3, 67))],
    [("empty", (0,)), ("a", (63,)), ("b", (65,))],
    [("a", (40, 30))],
    [("one", (1,))],
]
GUARD = 64  # entries before and after what a decoder may write


class Target(ABC):
    name: str

    @abstractmethod
    def make(self, chance: random.Random) -> Any: ...

    @abstractmethod
    def take(self, given: Any) -> None: ...

    def close(self) -> None:
        """Leave nothing behind in this process."""
        return None


@dataclass
class Payload(Target):
    """A codec's payload, from a peer: decode_add."""

    spec: str

    def __post_init__(self) -> None:
        codec = schemes.parse(self.spec)
        assert isinstance(codec, Codec)
        self.codec, self.name = codec, f"payload of {self.spec}"
        menu = codec.knob.menu if codec.knob else ()
        self.levels = [codec.level, *menu[:1], *menu[-1:]]
        self.whole: dict[tuple[int, float], list[bytes]] = {}

    def make(self, chance: random.Random) -> tuple[int, float, bytes]:
        shapes, level = chance.randrange(len(SHAPES)), chance.choice(self.levels)
        key = (shapes, level)
        if key not in self.whole:
            self.whole[key] = [self._encoded(*key, draw) for draw in (torch.randn, torch.zeros)]
        data = changed_bytes(chance.choice(self.whole[key]), chance, others=self.whole[key][0])
        return shapes, level, data

    def _encoded(self, shapes: int, level: float, draw: Callable[..., Tensor]) -> bytes:
        layout = layout_of(shapes)
        out = torch.zeros(self.codec.nbytes(layout, level), dtype=torch.uint8)
        self.codec.encode(Bucket(draw(layout.numel), layout), level, out)
        return out.numpy().tobytes()

    def take(self, given: tuple[int, float, bytes]) -> None:
        shapes, level, data = given
        layout = layout_of(shapes)
        guarded = torch.full((layout.numel + 2 * GUARD,), 7.0)
        out = guarded[GUARD : GUARD + layout.numel]
        try:
            self.codec.decode_add(as_tensor(data), layout, level, out, 0.5)
        finally:
            edges = torch.cat([guarded[:GUARD], guarded[GUARD + layout.numel :]])
            assert bool((edges == 7).all()), "a decoder wrote past its output"


@functools.cache
def layout_of(shapes: int) -> Layout:
    return Layout.of(SHAPES[shapes])


class Frame(Target):
    """A header between worker and server. Its length is the receiver's, so it is never cut."""

    name = "frames"
    whole = (
        frames.Push(frames.Kind.ASK, operation=2**63 + 5, level=4.0, workers=3, nbytes=4096, answer_bytes=9).pack(),
        frames.Push(frames.Kind.BYE).pack(),
        frames.Reply(frames.Verdict.FINE, sequence=3, answered=2, alive=2, nbytes=4096, checksum=777).pack(),
        frames.Reply(frames.Verdict.REFUSED, reason="it kept the others waiting").pack(),
    )

    def make(self, chance: random.Random) -> bytes:
        frame, other = (chance.choice(self.whole).numpy().tobytes() for _ in range(2))
        return changed_bytes(frame, chance, others=other, same_length=True)

    def take(self, given: bytes) -> None:
        kind = frames.Push if len(given) == frames.PUSH_BYTES else frames.Reply
        kind.unpack(as_tensor(given)).pack()


class Description(Target):
    """A request's description, from a worker: read, sized, and answered where it is small."""

    name = "operations"

    def __init__(self) -> None:
        layout, qsgd, fp16 = layout_of(1), schemes.codec("qsgd(bits=4)"), schemes.codec("fp16")
        self.whole = [
            operations.PlainSum("sum", "float32", 100).text,
            operations.PlainSum("max", "int64", 3).text,
            operations.PackedSum(5, True, 100).text,
            operations.DecodedMean(qsgd, layout, "float32", 0, fp16, None).text,
            operations.DecodedMean(schemes.codec("topk"), layout, "float32", 1, qsgd, 8.0).text,
            weights.Gradient(((qsgd, layout), (fp16, layout_of(0))), "float16").text,
        ]

    def make(self, chance: random.Random) -> tuple[str, float]:
        text = chance.choice(self.whole)
        if chance.random() < 0.5:
            text = json.dumps(changed_state(json.loads(text), chance), default=str)
        else:
            text = changed_text(text, chance, self.whole)
        return text, chance.choice([4.0, 4.0, 0.1, 0.0, -1.0, 1e6])

    def take(self, given: tuple[str, float]) -> None:
        text, level = given
        operation = operations.parse(text)
        sizes = operation.up_bytes(level), operation.down_bytes(level)
        assert all(isinstance(size, int) and size >= 0 for size in sizes), f"sizes {sizes}"


class Spec(Target):
    """Spec text, from a user or a peer."""

    whole: ClassVar = {
        "schemes": (schemes.parse, [
            "qsgd(bits=4, block=64)", "tnq(budget=3.2)", "topk(density=0.1, values='qsgd(bits=4)')", "fp32",
            "powersgd(factor_rank=2, sided='one')", "thc(bits=2, rotate=30)",
        ]),
        "mixers": (mixers.parse, ["choco(codec='qsgd(bits=4)', step=0.5)", "powergossip(iterations=2)", "dpsgd"]),
        "controllers": (control.parse, [
            "fixed(level=4)", "mqgrad(interval=5)", "uniform", "normrule", "schedule(levels=(2, 4), until=(5,))",
        ]),
    }  # fmt: skip

    def __init__(self, kind: str):
        self.name = f"specs of {kind}"
        self.parse, self.texts = self.whole[kind]

    def make(self, chance: random.Random) -> str:
        return changed_text(chance.choice(self.texts), chance, self.texts)

    def take(self, given: str) -> None:
        assert self.parse(self.parse(given).spec).spec == self.parse(given).spec, "its own spec makes another"


class Checkpoint(Target):
    """A saved state, from a file: taken whole, or refused and nothing changed."""

    SHAPES = (("w", (8, 8)), ("v", (40, 30)))

    def __init__(self, spec: str, controller: str | None = None):
        self.name = f"checkpoints of {spec}" + (f", {controller}" if controller else "")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # this process alone
        tensors = {name: torch.zeros(shape) for name, shape in self.SHAPES}
        group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        self.reducer = Reducer(tensors, spec, group, controller=controller, exempt=())
        for step in range(2):
            if controller:
                self.reducer.observe(1.0)
            self.reducer.reduce({name: torch.randn(shape) + step for name, shape in self.SHAPES})
        self.whole = _copied(self.reducer.state_dict(gather=True))

    def make(self, chance: random.Random) -> Any:
        return changed_state(self.whole, chance)

    def take(self, given: Any) -> None:
        before = _copied(self.reducer.state_dict())
        try:
            self.reducer.load_state_dict(given)
        except ValueError:
            assert _same(before, self.reducer.state_dict()), "refused, but something was taken"
            raise
        finally:
            self.reducer.load_state_dict(self.whole)

    def close(self) -> None:
        self.reducer.close()
        dist.destroy_process_group()


class GossipState(Target):
    """What a gossip node saved, from a file."""

    name = "gossip states"

    def __init__(self) -> None:
        self.node = _node("choco(codec='qsgd(bits=4)', step=0.5)")
        self.whole = _copied(self.node.state_dict())

    def make(self, chance: random.Random) -> Any:
        return changed_state(self.whole, chance)

    def take(self, given: Any) -> None:
        before = _copied(self.node.state_dict())
        try:
            self.node.load_state_dict(given)
        except ValueError:
            assert _same(before, self.node.state_dict()), "refused, but something was taken"
            raise
        finally:
            self.node.load_state_dict(self.whole)


class GossipMessage(Target):
    """A neighbour's message, with the news at its end. Its length is the receiver's."""

    def __init__(self, mixer: str):
        self.name, self.mixer = f"messages of {mixer}", mixer
        self.sizes = self._talk(_node(mixer), None)

    def make(self, chance: random.Random) -> list[bytes]:
        sizes = [*self.sizes, News(0, 5).nbytes]
        whole = [chance.randbytes(size) if chance.random() < 0.3 else bytes(size) for size in sizes]
        return [changed_bytes(data, chance, same_length=True) for data in whole]

    def take(self, given: list[bytes]) -> None:
        *messages, news = given
        node = _node(self.mixer)
        self._talk(node, messages)
        state = [node.flat, *(tensor for _, tensor in (*node.own.items(), *node.edge(1).items()))]
        assert all(bool(torch.isfinite(each).all()) for each in state), "a message made something non-finite"
        News(0, 5).read(1, news)

    def _talk(self, node: Node, messages: list[bytes] | None) -> list[int]:
        conversation, answer, sizes = node.mixing({1: 0.3}), None, []
        try:
            while True:
                said = conversation.send(answer)  # type: ignore[arg-type]
                sizes.append(said[1].numel())
                answer = {1: as_tensor(bytes(sizes[-1]) if messages is None else messages[len(sizes) - 1])}
        except StopIteration:
            return sizes


def _node(mixer: str) -> Node:
    torch.manual_seed(0)
    parameters = {"w": torch.randn(8, 5), "b": torch.randn(5)}
    node = Node(parameters, number=0, mixer=mixers.parse(mixer), seed=0)
    node.load(parameters)
    for neighbour in (1, 2):
        node.edge(neighbour)
    return node


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied(value) for value in state)
    return state.clone() if isinstance(state, Tensor) else state


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return one == other or (one != one and other != other)  # or both are NaN


def codecs() -> list[str]:
    """Every codec the registry finds, and variants that read other fields."""
    variants = [
        "qsgd(bits=1)", "qsgd(bits=3, block=64)", "topk(density=0.1, values='qsgd(bits=4)')", "tnq(bits=3, group=64)",
        "tnq(group='tensor')", "tnq(budget=3.2)", "eden(bits=3, rotate=30)", "natural(bits=3)",
    ]  # fmt: skip
    own = [name for name, scheme in schemes.registry().items() if issubclass(scheme, Codec)]
    return own + [spec for spec in variants if isinstance(tw.scheme(spec), Codec)]


def every_target() -> dict[str, Callable[[], Target]]:
    """{name: how to make it}"""
    made: dict[str, Callable[[], Target]] = {
        f"payload of {spec}": functools.partial(Payload, spec) for spec in codecs()
    }
    made |= {"frames": Frame, "operations": Description, "gossip states": GossipState}
    made |= {f"specs of {kind}": functools.partial(Spec, kind) for kind in Spec.whole}
    for spec, controller in (("topk", None), ("powersgd", None), ("qsgd", "mqgrad")):
        name = f"checkpoints of {spec}" + (f", {controller}" if controller else "")
        made[name] = functools.partial(Checkpoint, spec, controller)
    for mixer in (
        "dpsgd",
        "powergossip",
        "choco(codec='qsgd(bits=4)', step=0.5)",
        "deepsqueeze(codec='signsgd', step=0.5)",
    ):
        made[f"messages of {mixer}"] = functools.partial(GossipMessage, mixer)
    return made
