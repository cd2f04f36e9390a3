"""Memory: what a scheme keeps from step to step on one worker, by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.layout import Layout


def dense(value: object) -> bool:
    """Whether `value` is a tensor whose numbers can be copied into a memory."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_quantized or value.is_complex())
    )


class Memory:
    """Tensors by (parameter name, key).

    Names, never bucket numbers: DDP rebuilds its buckets after the first step, and a checkpoint may be loaded under
    other bucket sizes. `flat` lays one key of many parameters out as a bucket has them, so that kernels see one buffer.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self._flats: dict[tuple[str, tuple[tuple[str, int], ...]], Tensor] = {}
        self._keys: dict[str, list[str]] = {}  # of each parameter
        self._mirrors: dict[tuple[str, str], Tensor] = {}  # in CPU memory, of what lives on a device
        self._stash: dict[tuple[str, str], Tensor] = {}
        self._stashed: set[str] = set()
        self._sound = True  # all means that were judged since
        self._doubts: list[Tensor] = []  # of means on a device: NaN where one is not finite

    def add(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Remember a parameter, with what a scheme's `init` made for it."""
        self._keys[name] = list(state)
        for key, tensor in state.items():
            self._tensors[name, key] = tensor

    def __getitem__(self, name_key: tuple[str, str]) -> Tensor:
        return self._tensors[name_key]

    def __setitem__(self, name_key: tuple[str, str], tensor: Tensor) -> None:
        assert name_key in self._tensors, f"{name_key} is not in this memory: a scheme's init() declares what it keeps"
        kept = self._tensors[name_key]
        if kept.shape == tensor.shape:
            kept.copy_(tensor)  # a view of a flat, and its dtype, stay
        else:
            kernels.outlive(kept)
            self._tensors[name_key] = tensor

    def __contains__(self, name_key: tuple[str, str]) -> bool:
        return name_key in self._tensors

    def items(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        return iter(self._tensors.items())

    def flat(self, key: str, layout: Layout) -> Tensor:
        """`key` of every parameter of `layout`, where it says, as one tensor to read and write; gaps begin as 0."""
        flat = self._flats.get((key, layout.key))
        if flat is None:
            flat = self._tensors[layout.names[0], key].new_zeros(layout.extent)
            for segment in layout.segments:
                apart = self._tensors[segment.name, key]
                own = flat[segment.start : segment.stop].view(apart.shape).copy_(apart)
                kernels.outlive(apart)  # made on training's stream, and let go of here
                self._tensors[segment.name, key] = own
            # What lay in another grouping now lives here: forget every flat that holds one of these names.
            moved = set(layout.names)
            for other in list(self._flats):
                names = {name for name, _ in other[1]}
                if other[0] != key or moved.isdisjoint(names):
                    continue
                for name in names - moved:
                    self._tensors[name, key] = self._tensors[name, key].clone()
                kernels.outlive(self._flats.pop(other))
            self._flats[key, layout.key] = flat
        return flat

    def show(self, name: str, key: str) -> None:
        """Have what is remembered now be `shown`, some time after. No device is waited for."""
        tensor = self._tensors[name, key]
        if kernels.at_hand(tensor):
            return
        mirror = self._mirrors.get((name, key))
        if mirror is None:
            mirror = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._mirrors[name, key] = mirror
        mirror.copy_(tensor, non_blocking=True)

    def shown(self, key: str) -> float:
        """The sum of a number of all parameters; on a device as it was `shown` last, 0 before that."""
        total = 0.0
        for (name, own), tensor in self._tensors.items():
            seen = tensor if kernels.at_hand(tensor) else self._mirrors.get((name, own))
            total += float(seen) if own == key and seen is not None else 0.0
        return total

    def multiply(self, key: str, factor: float) -> None:
        """`key` of every parameter that has it, times `factor`."""
        for (_, own), tensor in self._tensors.items():
            if own == key:
                tensor.mul_(factor)

    def stash(self, names: Iterable[str]) -> None:
        """Keep a copy of what is remembered of these parameters, for `restore`."""
        for name in names:
            for key in self._keys.get(name, ()):
                kept, copy = self._tensors[name, key], self._stash.get((name, key))
                if copy is None or copy.shape != kept.shape:
                    self._stash[name, key] = kept.clone()
                else:
                    copy.copy_(kept)
            self._stashed.add(name)

    def restore(self, names: Iterable[str] | None = None) -> None:
        """Put back what was stashed of these parameters, or of all, as if nothing had happened since."""
        for name in self._stashed.intersection(self._stashed if names is None else names):
            for key in self._keys.get(name, ()):
                self[name, key] = self._stash[name, key].clone()

    def judge(self, mean: Tensor) -> None:
        """Take note whether a mean is finite, for `undo_nonfinite`. On a device nobody waits to know."""
        if not self._stashed:
            return
        if kernels.at_hand(mean):
            self._sound = self._sound and kernels.all_finite(mean)
        else:
            self._doubts.append(kernels.doubt(mean))

    def undo_nonfinite(self) -> None:
        """Restore all, if any mean that was judged since the last `forget_stash` is not finite."""
        if not self._sound:
            self.restore()
        elif self._doubts:
            judged = torch.cat(self._doubts)
            for name in self._stashed:
                for key in self._keys.get(name, ()):
                    kept = self._stash[name, key]
                    kernels.keep_finite_(kept, self._tensors[name, key], judged)
                    self[name, key] = kept

    def forget_stash(self) -> None:
        """What was stashed holds no more; its memory is kept for the next time."""
        self._stashed.clear()
        self._sound, self._doubts = True, []

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """{parameter: {key: tensor}}; the tensors are the memory itself, not copies."""
        state: dict[str, dict[str, Tensor]] = {}
        for (name, key), tensor in self._tensors.items():
            state.setdefault(name, {})[key] = tensor
        return state

    def check(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise ValueError unless `state` has the names, keys and shapes of this memory."""
        given = {(name, key) for name, entry in state.items() for key in entry}
        if given != set(self._tensors):
            missing, unknown = sorted(set(self._tensors) - given), sorted(given - set(self._tensors), key=str)
            raise ValueError(
                f"the saved memory does not fit: missing {missing[:3]}, unknown {unknown[:3]} "
                f"({len(missing)} and {len(unknown)} in all); it must come from the same model and scheme, "
                "with the same feedback= and exempt="
            )
        for (name, key), kept in self._tensors.items():
            tensor = state[name][key]
            if not dense(tensor):
                raise ValueError(f"saved {name!r} {key!r} must be a dense tensor of real numbers")
            if tensor.shape != kept.shape:
                raise ValueError(
                    f"saved {name!r} {key!r} has shape {tuple(tensor.shape)}, expected {tuple(kept.shape)}"
                )

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take every tensor of `state`, or raise ValueError and change nothing. Dtypes and devices stay as they are."""
        self.check(state)
        for name, key in self._tensors:
            self[name, key] = state[name][key]

    @property
    def nbytes(self) -> int:
        kept = chain(self._tensors.values(), self._stash.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)
