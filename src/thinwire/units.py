"""FSDP2 from the inside: the one place that touches what PyTorch keeps private."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from thinwire.core.partition import Exempt, exempted
from thinwire.core.parts import Piece, rows
from thinwire.core.scheme import Scheme
from thinwire.reducer import Reducer

SEEN = ("2.13",)  # PyTorch's versions that this was tried with; others are taken as long as nothing is missing
PRIVATE = (
    "fsdp_params", "mesh_info", "mp_policy", "post_backward", "force_sum_reduction_for_comms",
    "reduce_scatter_unused_params", "_reduce_scatter_comm", "_reduce_scatter_process_group",
)  # fmt: skip
PUBLIC = ("set_all_reduce_hook", "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms")

Derived = TypeVar("Derived")
Reduce = Callable[[Tensor, Tensor], None]  # (output, input): what a reduce-scatter does

NATIVE = """\
this model is sharded over a 2-d mesh, where PyTorch itself averages the replicas before anybody else is asked. Instead:
    fully_shard(module, mesh=mesh["shard"])                                            # of every module
    tw.attach(model, scheme, replicas=mesh["replicate"].get_group())"""


class Unit:
    """Parameters that FSDP2 gathers and reduces together: those of one fully_shard(), without its inner ones.

    Their gradients are reduced as one buffer: for every shard a row, of that shard's rows of every parameter that has a
    gradient in this pass, each padded to as many as the first shard has.
    """

    def __init__(self, module: FSDPModule, group: Any, names: dict[int, str]) -> None:
        self.module = module
        self._group = group
        self.names: list[str] = [names[id(each.sharded_param)] for each in group.fsdp_params]
        self.parameters: list[Tensor] = [each.sharded_param for each in group.fsdp_params]
        self.shapes: list[tuple[int, ...]] = [tuple(each._orig_size) for each in group.fsdp_params]
        self.shards: int = group.mesh_info.shard_mesh_size
        self.shard: int = group.mesh_info.shard_mesh_rank
        self.process_group: dist.ProcessGroup = group._reduce_scatter_process_group
        self._forced_sum: bool = group.force_sum_reduction_for_comms
        self.present: tuple[int, ...] = ()  # the parameters with a gradient in the pass under way
        self._derived: dict[tuple[str, tuple[int, ...]], Any] = {}

    def dtype(self, number: int) -> torch.dtype:
        """That a parameter's gradient is reduced in."""
        policy = self._group.mp_policy
        return policy.reduce_dtype or policy.param_dtype or self.parameters[number].dtype

    def pieces(self, shard: int, numbers: Sequence[int]) -> list[tuple[Piece, int]]:
        """A shard's rows of these parameters, and where they begin in the shard's row of the buffer."""
        found, at = [], 0
        for number in numbers:
            shape = self.shapes[number]
            each = -(-shape[0] // self.shards)
            first, last = (min(shape[0], (shard + i) * each) for i in (0, 1))
            piece = rows(self.names[number], shape, first, last)
            if piece.numel and first < last:
                found.append((piece, at))
            at += each * (torch.Size(shape[1:]).numel())
        return found

    def numel(self, numbers: Sequence[int]) -> int:
        """The length of one shard's row of the buffer."""
        return sum(-(-self.shapes[n][0] // self.shards) * torch.Size(self.shapes[n][1:]).numel() for n in numbers)

    def once(self, key: str, make: Callable[[], Derived]) -> Derived:
        """What follows from which parameters are present: made when it is first asked for, and kept."""
        if (key, self.present) not in self._derived:
            self._derived[key, self.present] = make()
        return self._derived[key, self.present]

    @property
    def watched(self) -> bool:
        return "post_backward" in vars(self._group)

    def watch(self) -> None:
        """Note, from now on, which parameters have a gradient before each reduction: nobody tells later."""
        plain = type(self._group).post_backward

        def noting(*inputs: Any) -> None:
            self.present = tuple(number for number, each in enumerate(self._group.fsdp_params) if self._reduced(each))
            plain(self._group, *inputs)

        self._group.post_backward = noting

    def _reduced(self, parameter: Any) -> bool:
        if not hasattr(parameter, "_unsharded_param"):  # not gathered, so not used
            return False
        whole = parameter._unsharded_param
        if parameter.unsharded_accumulated_grad is not None or whole.grad is not None:
            return True
        return self._group.reduce_scatter_unused_params and whole.requires_grad

    def after_reduction(self, hook: Callable[[Tensor], None]) -> None:
        """Have `hook` finish what the reduce-scatter left of this shard, in place."""
        self.module.set_all_reduce_hook(hook)

    def instead_of_reduction(self, reduce: Reduce) -> None:
        """Have `reduce` sum the parts of all shards' buffers; PyTorch divides afterwards."""
        self.module.set_force_sum_reduction_for_comms(True)
        self.module.set_custom_reduce_scatter(_ReduceScatter(reduce))

    def leave(self) -> None:
        """Reduce as FSDP2 does by itself."""
        if self.watched:
            del self._group.post_backward
        if isinstance(self._group._reduce_scatter_comm, _ReduceScatter):
            self.module.set_custom_reduce_scatter(DefaultReduceScatter())
            self.module.set_force_sum_reduction_for_comms(self._forced_sum)


class _ReduceScatter(ReduceScatter):
    """FSDP2's interface, called once for every unit and pass; it must have ended on return."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op, (op, async_op)
        self._reduce(output_tensor, input_tensor)


class Pass:
    """Tells a wire when its steps begin and end: with the first call of a backward pass, and with the pass."""

    def __init__(self, wire: Reducer) -> None:
        self._wire = wire
        self._task = -1  # the backward pass under way

    def enter(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._wire.begin_step()
            # FSDP2 has its own callback in the queue by now, in which it may call us, so this one comes after.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._task = -1
        self._wire.end_step()


def units_of(model: FSDPModule) -> list[Unit]:
    """Every unit of a sharded model, or ValueError for what cannot be taken."""
    assert isinstance(model, torch.nn.Module)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, Unit] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            check_names(module, PUBLIC)
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if id(group) not in found:
                    _check(group)
                    found[id(group)] = Unit(module, group, names)
    return list(found.values())


def tensors_of(
    units: Sequence[Unit], scheme: Scheme, exempt: Exempt, *, every: bool
) -> tuple[dict[str, Tensor], Callable[[str, Tensor], bool]]:
    """The pieces of this rank's shard, or of every shard, as tensors; and which of them are exempt, by the whole."""
    tensors: dict[str, Tensor] = {}
    exact: set[str] = set()
    for unit in units:
        trained = [n for n, parameter in enumerate(unit.parameters) if parameter.requires_grad]
        for number in trained:
            whole = torch.empty((), dtype=unit.dtype(number), device=unit.parameters[number].device)
            whole = whole.expand(unit.shapes[number])
            spared = exempted(exempt, scheme, unit.names[number], whole)
            for shard in range(unit.shards) if every else (unit.shard,):
                for piece, _ in unit.pieces(shard, [number]):
                    tensors[piece.name] = piece.like(whole)
                    exact |= {piece.name} if spared else set()
    return tensors, lambda name, _: name in exact


def check_names(thing: object, names: Sequence[str]) -> None:
    """Raise ValueError where PyTorch calls something otherwise than in the versions that were seen."""
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise ValueError(
            f"FSDP2 is taken as it is in PyTorch {', '.join(SEEN)}; this is {torch.__version__}, whose "
            f"{type(thing).__name__} has no {', '.join(missing)}"
        )


def _check(group: Any) -> None:
    check_names(group, PRIVATE)
    if isinstance(group.mesh_info, HSDPMeshInfo):
        raise ValueError(NATIVE)
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        raise ValueError(f"parameters must be sharded, these are over {type(group.mesh_info).__name__}")
    for each in group.fsdp_params:
        if each.offload_to_cpu:
            raise ValueError("CPU offload is not supported: leave offload_policy out of fully_shard()")
        if each.is_dtensor:
            raise ValueError(
                "parameters that are DTensors before fully_shard(), as under tensor parallelism, are not supported"
            )
        if each.fsdp_placement.dim != 0:
            raise ValueError(f"parameters must be sharded by rows, Shard(0), got {each.fsdp_placement}")
