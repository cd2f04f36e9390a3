"""The lane of accelerators on a device that is played: nothing is read too early or out of order, and nobody waits."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist

from helpers.gradients import gradient
from helpers.played import SIDE, TRAINING, NoDevice, Played, TooEarly, _PlayedWork, on_a_device
from helpers.specs import every_spec
from thinwire.core.feedback import Feedback
from thinwire.core.layout import Layout
from thinwire.exchange import allreduce
from thinwire.exchange.lane import Streamed, Threaded
from thinwire.exchange.transport import Transport
from thinwire.kernels import backends
from thinwire.lab.cost.rehearsal import Rehearsal
from thinwire.reducer import Reducer, device_of
from thinwire.schemes import parse

SHAPES = [("w", (37, 29)), ("v", (32, 40)), ("b", (11,)), ("u", (65, 17))]
BUCKETS = [SHAPES[:1], SHAPES[1:3], SHAPES[3:]]
WORKERS = 3


@dataclass(frozen=True)
class Logged:
    """A collective that takes note when it is started and when it is waited for."""

    name: object
    log: list

    def amounts(self):
        return {"bytes_sent": 1}

    def start(self):
        self.log.append(("start", self.name))
        return self

    def wait(self):
        self.log.append(("wait", self.name))


REFUSED = ["tnq(budget=3.2)"]


def wire(spec, exchange, **options):
    return Reducer({name: torch.zeros(shape) for name, shape in SHAPES}, spec, None, exchange=exchange, **options)


def gradients(step, bad=None):
    found = [gradient(sum(torch.Size(shape).numel() for _, shape in bucket), seed=7 * step + i)
             for i, bucket in enumerate(BUCKETS)]  # fmt: skip
    if bad is not None:
        found[1][5] = bad
    return found


def train(reducer, steps, bring=lambda *tensors: None, bad=None):
    """What a training loop does to its buckets, and what it finds there."""
    layouts = [Layout.of(bucket) for bucket in BUCKETS]
    buffers = [torch.zeros(layout.numel) for layout in layouts]
    given = [gradients(step, bad if step == steps - 1 else None) for step in range(steps)]
    bring(*buffers, *(t for step in given for t in step), *(t for _, t in reducer.memory.items()))
    found = []
    for step in range(steps):
        reducer.begin_step()
        for number, (buffer, layout) in enumerate(zip(buffers, layouts, strict=True)):
            buffer.copy_(given[step][number])
            reducer.submit(buffer, layout, last=number == len(buffers) - 1, done=lambda error: None)
        reducer.end_step()
        found.append([buffer * 1 for buffer in buffers])
    kept = [t.clone() for (_, key), t in reducer.memory.items() if key != "fallbacks"]  # which a device does not count
    return [t.clone() for step in found for t in step] + kept


def expected(monkeypatch, spec, steps, bad=None, **options):
    """The same on a CPU, where one looks at what one has; by the references, too."""
    with monkeypatch.context() as patch:
        patch.setattr(backends, "FAST", {})
        backends._found.cache_clear()
        result = train(wire(spec, Rehearsal(WORKERS, lambda: None), **options), steps, bad=bad)
    backends._found.cache_clear()
    return result


def same(found, wanted, spec):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        one, other = one.nan_to_num(), other.nan_to_num()
        if spec.startswith("powersgd"):  # another basis of the same span: rows may have the other sign
            torch.testing.assert_close(one.abs(), other.abs(), rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [None, torch.nan])
@pytest.mark.parametrize("spec", [spec for spec in every_spec() if spec not in REFUSED])
def test_every_scheme_on_a_device(spec, bad, monkeypatch):
    """No read before its write, no host that waits, and the bits of the CPU; whatever a step brings."""
    wanted = expected(monkeypatch, spec, 2, bad)
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        found = train(wire(spec, Played(device, WORKERS)), 2, device.bring, bad)
    assert device.operations > 20, "somebody was watched"
    same(found, wanted, spec)
    assert device.collectives and all(stream == SIDE for _, _, stream in device.collectives)


@pytest.mark.parametrize("spec", [spec for spec in every_spec() if spec not in REFUSED])
def test_every_scheme_with_the_other_feedback(spec, monkeypatch):
    """Remembering what it loses where it need not, or not where it should."""
    other = parse(spec).unbiased
    wanted = expected(monkeypatch, spec, 2, feedback=other)
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        found = train(wire(spec, Played(device, WORKERS), feedback=other), 2, device.bring)
    same(found, wanted, spec)


def test_whose_messages_are_as_long_as_the_gradients_have_it_is_refused(monkeypatch):
    """NCCL wants to be told how long, and would have to be kept waiting; this list is whole."""
    assert [spec for spec in every_spec() if parse(spec).sized_by_numbers] == REFUSED
    waits = pytest.raises(RuntimeError, match="of what is on the device")
    with monkeypatch.context() as patch, on_a_device(patch) as device, waits:
        train(wire(REFUSED[0], Played(device, WORKERS)), 1, device.bring)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    for wrapped in (parse(REFUSED[0]), Feedback(parse(REFUSED[0]))):
        with pytest.raises(ValueError, match="accepted: bits="):
            allreduce.AllReduce().open(FakeGroup(cuda=FakeNCCL()), wrapped, torch.device("cuda:1"))


def test_seconds_are_the_device_s_and_are_read_when_they_are_known(monkeypatch):
    names = ("encode_seconds", "wire_seconds", "exposed_seconds")
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        reducer = wire("topk(density=0.1)", Played(device, WORKERS))
        seen = []
        for step in range(3):
            train(reducer, 1, device.bring)
            seen.append([reducer.stats()[name] for name in names])
            if step == 1:
                device.done = {SIDE: device.known[SIDE][SIDE]}  # and training's stream is not there yet
                seen.append([reducer.stats()[name] for name in names])
        device.done = {stream: clock[stream] for stream, clock in device.known.items()}
        seen.append([reducer.stats()[name] for name in names])
        again = [reducer.stats()[name] for name in names]
    nothing, still_nothing, some, no_more, all_ = seen
    assert all(seconds < 0.5 for seconds in (*nothing, *still_nothing)), "nothing is known, and nobody waits to know"
    assert some[0] >= 10 and some[2] < 0.5, "spans are read in order, up to the first that is not over"
    assert all_[0] > no_more[0] >= some[0] and all_[1] > 0 and all_[2] >= 3 and again == all_


@pytest.mark.parametrize("forgotten", ["turn", "join", "work"])
def test_a_wait_that_is_forgotten_is_found(forgotten, monkeypatch):
    """By the played device: what it says of the lane is worth something."""
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        if forgotten == "work":
            patch.setattr(_PlayedWork, "wait", lambda self: None)
        else:
            whole = device.wait
            waiter = SIDE if forgotten == "turn" else TRAINING
            patch.setattr(device, "wait", lambda who, clock: None if who == waiter else whole(who, clock))
        with pytest.raises((RuntimeError, TooEarly), match="against"):
            train(wire("topk(density=0.1)", Played(device, WORKERS)), 2, device.bring)


@pytest.mark.parametrize("rounds", [(1, 1, 1), (2, 3, 1), (3, 1, 2)])
def test_the_order_is_first_rounds_as_they_come_then_round_after_round(rounds):
    log = []

    def talk(name, count, scratch):
        for number in range(count):
            yield [Logged((name, number), log)]
        return name

    lane = Streamed(Transport(), NoDevice())
    told = []
    for _ in range(2):
        log.clear()
        told.clear()
        for name, count in zip("abc", rounds, strict=True):
            lane.submit(partial(talk, name, count), last=name == "c", done=lambda error, name=name: told.append(name))
            assert log[-1] == ("start", (name, 0)) or name == "c", "a first round goes out with its bucket"
        started = [name for what, name in log if what == "start"]
        assert started == sorted(started, key=lambda each: (each[1], each[0]))
        assert len(started) == sum(rounds) and sorted(told) == ["a", "b", "c"]


def test_a_failure_ends_the_lane_and_everybody_hears_of_it():
    lane, told = Streamed(Transport(), NoDevice()), []

    def broken(scratch):
        raise ValueError("no such thing")
        yield

    def fine(scratch):
        yield [Logged("x", [])]
        return 1

    for begin in (fine, broken, fine):
        lane.submit(begin, last=False, done=lambda error: told.append(str(error)))
    assert told == ["no such thing"] * 3
    lane.close()
    lane.close()


def test_closed_in_the_middle_of_a_step():
    lane, told = Streamed(Transport(), NoDevice()), []

    def fine(scratch):
        yield [Logged("x", [])]
        return 1

    lane.submit(fine, last=False, done=lambda error: told.append(str(error)))
    lane.close()
    lane.submit(fine, last=True, done=lambda error: told.append(str(error)))
    assert told == ["the lane was closed in the middle of a step"] * 2


def test_a_loss_scale_is_followed_without_a_wait(monkeypatch):
    """A step that is not finite leaves nothing behind, and nobody waits to know that it was."""
    spec = "topk(density=0.1)"

    def scaled(reducer):
        reducer.scale(1.0)
        return reducer

    with monkeypatch.context() as patch:
        patch.setattr(backends, "FAST", {})
        backends._found.cache_clear()
        wanted = train(scaled(wire(spec, Rehearsal(WORKERS, lambda: None))), 3, bad=torch.inf)
    backends._found.cache_clear()
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        found = train(scaled(wire(spec, Played(device, WORKERS))), 3, device.bring, torch.inf)
    same(found, wanted, spec)


@pytest.mark.parametrize("denominator", ["previous", "current"])
def test_what_was_sent_again_is_told_without_a_wait(denominator, monkeypatch):
    spec = f"regtopk(density=0.3, denominator={denominator!r})"
    plain = wire(spec, Rehearsal(WORKERS, lambda: None))
    train(plain, 3)
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        reducer = wire(spec, Played(device, WORKERS))
        train(reducer, 3, device.bring)
        told = reducer.stats()["resent"]
    assert told == plain.stats()["resent"] > 0


class HostStage:
    """A device whose memory is CPU memory, too: what a stage does, by plain copies."""

    def __init__(self):
        self.marks = self.fetched = self.delivered = 0

    def mark(self):
        self.marks += 1
        return self.marks

    def fetch(self, bucket, ready, scratch):
        assert ready <= self.marks
        self.fetched += 1
        return scratch.take("staged", bucket.numel(), bucket.dtype).copy_(bucket)

    def deliver(self, there, bucket):
        self.delivered += 1
        bucket.copy_(there)


@pytest.mark.parametrize("spec", ["qsgd(bits=4)", "topk(density=0.1)", "fp16"])
def test_buckets_of_a_device_that_are_exchanged_on_the_cpu(spec):
    """The way of gloo and of parameter servers: the same means and the same memory, in the buckets themselves."""
    wanted = train(wire(spec, Rehearsal(WORKERS, lambda: None)), 2)
    reducer = wire(spec, Rehearsal(WORKERS, lambda: None))
    reducer._stage = stage = HostStage()
    same(train(reducer, 2), wanted, spec)
    assert stage.marks == stage.fetched == stage.delivered == 2 * len(BUCKETS)


class FakeNCCL:
    """A backend for tensors of a GPU."""


class FakeGroup:
    """A process group with a backend for each type of device."""

    def __init__(self, **backends):
        self._backends = backends

    def _get_backend(self, device):
        return self._backends[device.type]

    def size(self):
        return 2


@pytest.mark.parametrize(
    ("backends", "device", "streams"),
    [
        ({"cpu": object(), "cuda": FakeNCCL()}, "cuda:1", True),  # init_process_group("cpu:gloo,cuda:nccl")
        ({"cuda": FakeNCCL()}, "cuda:1", True),
        ({"cpu": object(), "cuda": object()}, "cuda:1", False),  # gloo, which has CPU memory
        ({"cpu": object(), "cuda": FakeNCCL()}, "cpu", False),
    ],
)
def test_who_works_on_which_device(backends, device, streams, monkeypatch):
    """NCCL's collectives run on the model's own device and group; for gloo, buckets come to the CPU."""
    group, device = FakeGroup(**backends), torch.device(device)
    made = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: made.append(args) or object.__new__(Own))
    monkeypatch.setattr(dist, "ProcessGroup", Own)
    known = {"get_world_size": 2, "get_rank": 1, "get_process_group_ranks": [0, 1], "get_backend": "gloo"}
    for name, answer in known.items():
        monkeypatch.setattr(dist, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(allreduce, "timeout_of", lambda group: None)
    monkeypatch.setattr(allreduce, "CudaSide", lambda where: NoDevice())
    exchange = allreduce.AllReduce()
    exchange.open(group, parse("qsgd(bits=4)"), device)
    try:
        assert exchange.device == (device if streams else torch.device("cpu"))
        assert isinstance(exchange.lane, Streamed if streams else Threaded)
        assert (exchange.group is group) == streams and bool(made) == (not streams)
        assert (exchange.direct(parse("fp16")) is None) == (device.type == "cuda")
    finally:
        exchange._let_go = None
        exchange.close()


class Own(FakeGroup):
    """A group of our own."""


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(ValueError, match="one device, these are on cpu, meta"):
        device_of({"a": torch.zeros(1), "b": torch.zeros(1, device="meta")})
