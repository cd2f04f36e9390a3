"""A device whose tensors have no memory: to look at a number there is an error, and what is made there is added up."""

import weakref
from collections import Counter, defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.played import NoDevice
from thinwire.core.layout import Layout
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.lane import Streamed
from thinwire.lab.cost.rehearsal import Rehearsed, _PretendedGroup
from thinwire.reducer import Reducer


class Made(TorchDispatchMode):
    """What lives on the device of all that was made there meanwhile, at most; and what came there from CPU memory."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.carried = defaultdict(int)  # bytes, by operation
        self._holders = Counter()  # by storage: the tensors over it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        found = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor) and each.device.type == "meta"]
        known = {each.untyped_storage()._cdata for each in given}
        for each in found:
            storage = each.untyped_storage()
            new = storage._cdata not in known and storage._cdata not in self._holders
            if new or storage._cdata in self._holders:
                self._hold(each, storage._cdata, storage.nbytes(), new)
        if found and function._schema.name in ("aten::_to_copy", "aten::copy_"):
            self.carried[function._schema.name] += sum(each.nbytes for each in given if each.device.type == "cpu")
        return made

    def _hold(self, tensor, storage, nbytes, new):
        self._holders[storage] += 1
        if new:
            self.now += nbytes
            self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._let_go, storage, nbytes)

    def _let_go(self, storage, nbytes):
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self.now -= nbytes


class Unmade(AllReduce):
    """An AllReduce on such a device, whose workers are all copies of this one."""

    def __init__(self, workers):
        super().__init__(transport=Rehearsed())
        self.workers, self.worker = workers, 0

    def open(self, group, scheme, device=None):
        self.group, self.device = _PretendedGroup(self.workers), device
        self.lane = Streamed(self.transport, NoDevice())

    def direct(self, scheme):
        return None

    def agree(self, given):
        """Copies agree."""

    def close(self):
        self.lane = None


def step_of(spec, shapes, device, dtype, workers=3, **options):
    """(what a step made there, the bytes that it sent): the third, when all that is kept is there."""
    tensors = {name: torch.zeros(shape, device=device, dtype=dtype) for name, shape in shapes}
    reducer, layout = Reducer(tensors, spec, None, exchange=Unmade(workers), **options), Layout.of(shapes)
    buffer, made, before = torch.zeros(layout.numel, device=device, dtype=dtype), Made(), 0.0
    for number in range(3):
        before = reducer.stats()["bytes_given"]
        reducer.begin_step()
        if number == 2:
            with made:
                reducer.submit(buffer, layout, last=True, done=lambda error: None)
                reducer.end_step()
        else:
            reducer.submit(buffer, layout, last=True, done=lambda error: None)
            reducer.end_step()
    return made, reducer.stats()["bytes_given"] - before
