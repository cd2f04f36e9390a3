"""Memory: what a scheme keeps from step to step on one worker, by parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from thinwire.core.layout import Layout


class Memory:
    """Tensors by (parameter name, key).

    Names, never bucket numbers: DDP rebuilds its buckets after the first step, and a checkpoint may be loaded under
    other bucket sizes. `flat` lays one key of many parameters end to end, so that kernels see one buffer.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self._flats: dict[tuple[str, tuple[str, ...]], Tensor] = {}
        self.names: set[str] = set()

    def add(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Remember a parameter, with what a scheme's `init` made for it."""
        self.names.add(name)
        for key, tensor in state.items():
            self._tensors[name, key] = tensor

    def __getitem__(self, name_key: tuple[str, str]) -> Tensor:
        return self._tensors[name_key]

    def __setitem__(self, name_key: tuple[str, str], tensor: Tensor) -> None:
        assert name_key in self._tensors, f"{name_key} is not in this memory: a scheme's init() declares what it keeps"
        kept = self._tensors[name_key]
        if kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            kept.copy_(tensor)
        else:
            self._tensors[name_key] = tensor

    def __contains__(self, name_key: tuple[str, str]) -> bool:
        return name_key in self._tensors

    def items(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        return iter(self._tensors.items())

    def flat(self, key: str, layout: Layout) -> Tensor:
        """`key` of every parameter of `layout`, end to end, as one tensor to read and write."""
        flat = self._flats.get((key, layout.names))
        if flat is None:
            flat = torch.cat([self._tensors[name, key].reshape(-1) for name in layout.names])
            for segment in layout.segments:
                shape = self._tensors[segment.name, key].shape
                self._tensors[segment.name, key] = flat[segment.start : segment.stop].view(shape)
            # What lay in another grouping now lives here: forget every flat that holds one of these names.
            moved = set(layout.names)
            for other in [o for o in self._flats if o[0] == key and not moved.isdisjoint(o[1])]:
                for name in set(other[1]) - moved:
                    self._tensors[name, key] = self._tensors[name, key].clone()
                del self._flats[other]
            self._flats[key, layout.names] = flat
        return flat

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """{parameter: {key: tensor}}; the tensors are the memory itself, not copies."""
        state: dict[str, dict[str, Tensor]] = {}
        for (name, key), tensor in self._tensors.items():
            state.setdefault(name, {})[key] = tensor
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take every tensor of `state`. Names and keys must be the ones this memory has."""
        given = {(name, key) for name, entry in state.items() for key in entry}
        if given != set(self._tensors):
            missing, unknown = sorted(set(self._tensors) - given), sorted(given - set(self._tensors))
            raise ValueError(
                f"the saved memory does not fit: missing {missing[:3]}, unknown {unknown[:3]} "
                f"({len(missing)} and {len(unknown)} in all); it must come from the same model and scheme"
            )
        for (name, key), kept in self._tensors.items():
            tensor = state[name][key]
            if tensor.shape != kept.shape:
                raise ValueError(
                    f"saved {name!r} {key!r} has shape {tuple(tensor.shape)}, expected {tuple(kept.shape)}"
                )
        for name, key in given:
            self[name, key] = state[name][key].to(self._tensors[name, key].device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())
