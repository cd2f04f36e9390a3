"""A device that is played: streams and waits as objects, over tensors that are in CPU memory.

Everything is done at once, in the order of the program, and taken note of: which stream would do it, what it reads and
writes, and what that stream has waited for. Two accesses of the same memory, one of which writes, must be ordered by
streams and waits alone; else there is an order of execution, as adverse as you like, in which one comes too early.
Memory that is let go of may be anybody's again with the next thing that the stream does which it was made for: by then
that stream must know of all that others did to it.
"""

import weakref
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from thinwire import kernels
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.lane import Streamed
from thinwire.kernels import backends
from thinwire.lab.cost.rehearsal import Rehearsed, _PretendedGroup

TRAINING, SIDE, WIRE = "training", "side", "wire"
# What a host cannot have without waiting for the device: a number of it, or a size that depends on its numbers.
WAITS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor",
}  # fmt: skip


class TooEarly(AssertionError):
    """Two streams meet in the same memory, in an order that nobody has fixed."""


class HostWait(AssertionError):
    """The host waits for the device."""


@dataclass
class Access:
    """Who did what, as its how manieth, to which bytes of a storage."""

    stream: str
    number: int
    what: str
    begin: int
    end: int
    writes: bool


@dataclass
class Flight:
    """CPU memory that a device copies from or to by itself, as the how manieth of a stream, until the host waited."""

    memory: tuple[int, int, int]
    stream: str
    number: int
    writes: bool


@dataclass
class Device(TorchDispatchMode):
    """Plays one device. Entered, it watches all that PyTorch does."""

    current: str = TRAINING
    done: dict[str, float] = field(default_factory=dict)  # by stream: how far it is known to have got; else nowhere
    watch_host: bool = True
    watch_flights: bool = False  # no copy may be waited for by itself, nor its CPU memory be touched before it is over
    collectives: list[tuple] = field(default_factory=list)
    operations: int = 0

    def __post_init__(self):
        super().__init__()
        self.known = defaultdict(lambda: defaultdict(int))  # by stream: how far each other one had got
        self.accesses = defaultdict(list)  # by storage
        self.here = set()  # storages on the device
        self.home = {}  # by storage: the stream that it was made for
        self.freed = []  # (home, what others had done to it) of memory that nobody has used again
        self.inside_kernel = 0
        self.flights = []  # not yet waited for
        self.held = []

    # -- streams -------------------------------------------------------------------------------------------------------

    def step(self, stream):
        self.known[stream][stream] += 1
        return self.known[stream][stream]

    def wait(self, waiter, clock):
        for stream, number in clock.items():
            self.known[waiter][stream] = max(self.known[waiter][stream], number)

    @contextmanager
    def turn(self):
        self.wait(SIDE, dict(self.known[self.current]))
        before, self.current = self.current, SIDE
        try:
            yield
        finally:
            self.current = before

    def join(self):
        self.wait(self.current, dict(self.known[SIDE]))

    def mark(self):
        return self.current, self.step(self.current)

    def seconds(self, begin, end):
        """One for each thing that a stream did."""
        assert begin[0] == end[0], "a span is one stream's"
        return end[1] - begin[1] if end[1] <= self.done.get(end[0], 0) else None

    def land(self, mark):
        """The host waits for a mark."""
        stream, number = mark
        self.flights = [each for each in self.flights if each.stream != stream or each.number > number]

    # -- memory --------------------------------------------------------------------------------------------------------

    def bring(self, *tensors):
        """These are the device's."""
        for tensor in tensors:
            self.here.add(_key(tensor))
            self.hold(tensor)

    def hold(self, tensor):
        """Of this stream's memory, as long as anybody has it."""
        key, storage = _key(tensor), tensor.untyped_storage()
        if key not in self.home:
            self.home[key] = self.current
            if self.watch_flights:
                self.held.append(storage)  # no CPU memory is used twice under another name
            weakref.finalize(storage, self.let_go, key).atexit = False

    def let_go(self, key):
        home, here = self.home.pop(key), key in self.here
        others = [each for each in self.accesses.pop(key, ()) if each.stream != home]
        self.here.discard(key)
        if here and others:
            self.freed.append((home, others))

    def outlive(self, tensor):
        """As `kernels.outlive`: whose memory waits for what this stream has done with it."""
        kept = self.accesses[_key(tensor)]
        self.accesses[_key(tensor)] = [each for each in kept if each.stream != self.current]

    def use_again(self, stream, what):
        """Something new is done: in memory that was let go of."""
        mine = [others for home, others in self.freed if home == stream]
        self.freed = [(home, others) for home, others in self.freed if home != stream]
        for old in (old for others in mine for old in others):
            if self.known[stream][old.stream] < old.number:
                raise TooEarly(f"{what} on {stream} may use memory again, against {old.what} on {old.stream}")

    def access(self, tensor, writes, what, number, stream):
        key = _key(tensor)
        if key not in self.here or not tensor.numel():
            return
        _, begin, end = _memory(tensor)
        new = Access(stream, number, what, begin, end, writes)
        for old in self.accesses[key]:
            meets = old.begin < new.end and new.begin < old.end and (old.writes or new.writes)
            if meets and old.stream != stream and self.known[stream][old.stream] < old.number:
                raise TooEarly(f"{new.what} on {stream} against {old.what} on {old.stream}")
        kept = [
            old for old in self.accesses[key]
            if not (writes and begin <= old.begin and old.end <= new.end)  # whoever knows this one knows those
        ]  # fmt: skip
        self.accesses[key] = [*kept, new]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        on_device = any(_key(each) in self.here for each in given)
        name = func._schema.name
        if on_device and self.watch_host and not self.inside_kernel:
            masks = name == "aten::index" and any(index is not None and index.dtype is torch.bool for index in args[1])
            if name in WAITS or f"{name}.{func._overloadname}" in WAITS or masks:
                raise HostWait(f"{name} of what is on the device")
        if self.watch_flights:
            self.fly(func, args, kwargs, given)
        result = func(*args, **kwargs)
        made = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
        if _fetches(name, args, kwargs, self.here):
            made = []
        for each in made:
            self.hold(each)
        if on_device:
            self.here.update(_key(each) for each in made)
            written = [] if _fetches(name, args, kwargs, self.here) else _written(func, args, kwargs)
            if not func.is_view:
                self.here.update(_key(each) for each in written)
                self.use_again(self.current, name)
                number = self.step(self.current)
                self.operations += 1
                for each in given:
                    self.access(each, False, name, number, self.current)
                for each in [*written, *made]:
                    self.access(each, True, name, number, self.current)
        return result

    def fly(self, func, args, kwargs, given):
        """Before an operation: is the CPU memory that it needs at rest; and does it send some on its way?"""
        if func.is_view:
            return
        written = [_memory(each) for each in _written(func, args, kwargs)]
        host = [_memory(each) for each in given if _key(each) not in self.here]
        copies = func._schema.name == "aten::copy_" and len(host) == 1
        for flight in self.flights:
            ordered = copies and self.known[self.current][flight.stream] >= flight.number
            touched = [each for each in host if _meet(each, flight.memory) and (flight.writes or each in written)]
            if touched and not ordered:
                raise TooEarly(f"{func._schema.name} against a copy of {flight.stream} that is not over")
        if copies:
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                raise HostWait("a copy between CPU memory and the device that is waited for")
            number = self.known[self.current][self.current] + 1
            self.flights += [Flight(each, self.current, number, each in written) for each in host]

    # -- what the host asks --------------------------------------------------------------------------------------------

    def asked(self, what, tensor):
        if self.watch_host and not self.inside_kernel and _key(tensor) in self.here:
            raise HostWait(f"{what} of what is on the device")


def _key(tensor):
    return tensor.untyped_storage()._cdata


def _memory(tensor):
    """(storage, begin, end), in bytes."""
    begin = tensor.storage_offset() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return _key(tensor), begin, begin + (reach * tensor.element_size() if tensor.numel() else 0)


def _meet(one, other):
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def _fetches(name, args, kwargs, here):
    """Whether this is a copy to the host's memory that nobody waits for: it stays the host's."""
    if name != "aten::copy_" or _key(args[0]) in here:
        return False
    return args[2] if len(args) > 2 else kwargs.get("non_blocking", False)


def _written(func, args, kwargs):
    by_name = [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
    found = []
    for argument, value in [*zip(func._schema.arguments, args, strict=False), *by_name]:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += value if isinstance(value, list | tuple) else [value]
    return found


class PlayedLandings:
    """The host waits for copies of a played device."""

    def __init__(self, device):
        self.device, self.waits = device, 0

    def mark(self):
        return self.device.mark()

    def wait(self, mark):
        self.waits += 1
        self.device.land(mark)


class NoDevice:
    """A side that is the training thread itself."""

    def turn(self):
        return nullcontext()

    def join(self):
        """There is nobody to wait for."""

    def mark(self):
        return 0.0

    def seconds(self, begin, end):
        return end - begin


class PlayedTransport(Rehearsed):
    """Collectives on a wire of their own: after what their stream has to do, and waited for by streams alone."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def launch(self, collective):
        device, wire = self.device, f"{WIRE} {id(collective.group)}"
        device.wait(wire, dict(device.known[device.current]))
        number = device.step(wire)
        device.collectives.append((type(collective).__name__, collective.tensor.numel(), device.current))
        before, device.current = device.current, wire
        with torch.no_grad():
            super().launch(collective)
        device.current = before
        return _PlayedWork(device, {**device.known[wire], wire: device.known[wire][wire]}, number, collective)


@dataclass
class _PlayedWork:
    device: Device
    clock: dict
    number: int
    collective: object  # whose tensors are held until somebody has waited, as NCCL does

    def wait(self):
        self.device.wait(self.device.current, self.clock)
        self.collective = None


class Played(AllReduce):
    """An AllReduce on a played device, whose workers are all copies of this one."""

    def __init__(self, device, workers, **options):
        super().__init__(transport=PlayedTransport(device), **options)
        self.played, self.workers, self.worker = device, workers, 0

    def open(self, group, scheme, device=None):
        self.group = _PretendedGroup(self.workers)
        self.lane = Streamed(self.transport, self.played)

    def direct(self, scheme):
        return None

    def agree(self, given):
        """Copies agree."""

    def close(self):
        self.lane = None


@contextmanager
def on_a_device(monkeypatch, **options):
    """What PyTorch does in here is done on a played device: by the references, and nothing of it is at hand."""
    device = Device(**options)
    monkeypatch.setattr(backends, "FAST", {})
    backends._found.cache_clear()
    monkeypatch.setattr("thinwire.kernels.blockstats.at_hand", lambda x: False)
    monkeypatch.setattr(kernels, "at_hand", lambda x: False)
    monkeypatch.setattr(kernels, "outlive", device.outlive)
    for name in kernels.__all__:
        operation = getattr(kernels, name)
        if callable(operation) and name not in ("at_hand", "all_finite", "outlive", "seen_nonfinite", "Levels"):
            monkeypatch.setattr(kernels, name, _within(device, operation))
    monkeypatch.setattr(kernels, "all_finite", _asking(device, "all_finite", kernels.all_finite))
    for name in ("tolist", "numpy", "cpu", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, _asking(device, name, getattr(torch.Tensor, name)))
    with device:
        yield device
    backends._found.cache_clear()


def _within(device, operation):
    """Kernels of a device wait for nobody; the references, which stand in for them, may."""

    @wraps(operation)
    def call(*args, **kwargs):
        device.inside_kernel += 1
        try:
            return operation(*args, **kwargs)
        finally:
            device.inside_kernel -= 1

    return call


def _asking(device, name, method):
    @wraps(method)
    def call(tensor, *args, **kwargs):
        device.asked(name, tensor)
        device.inside_kernel += 1
        try:
            return method(tensor, *args, **kwargs)
        finally:
            device.inside_kernel -= 1

    return call
