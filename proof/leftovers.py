"""What a command leaves behind that was not there before: processes, files, network namespaces."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.lab.runs import launch

_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def nothing_stays(found: list[str]) -> Iterator[None]:
    """Adds to `found` what is left after the block that was not there before it: processes, files, namespaces."""
    launch.on_ranks(_nothing, 1)  # the server that processes are forked from stays, by design
    _adopt(True)
    before = _processes() | _namespaces()
    with tempfile.TemporaryDirectory(prefix="thinwire-chaos-") as folder:
        usual, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = usual
            found += [f"a file: {path}" for path in Path(folder).rglob("*")]
    found += sorted((_processes() | _namespaces()) - before)
    _adopt(False)


def _nothing(place: launch.Place) -> None:
    """For the first process of all."""


def _adopt(so: bool) -> None:
    """Whether a process whose parent is gone becomes our child, and so is found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(so))


def _processes() -> set[str]:
    """Of our descent, dead ones that nobody asked after included."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = entry.read_text().rpartition(")")
            state, parent = rest.split()[:2]
            told = f"a process: {name}){', dead' if state == 'Z' else ''}"
            children.setdefault(int(parent), []).append((int(entry.parent.name), told))
    found, looking = set(), [os.getpid()]
    while looking:
        for pid, told in children.get(looking.pop(), ()):
            found.add(told)
            looking.append(pid)
    return found


def _namespaces() -> set[str]:
    folder = Path("/run/netns")
    return {f"a namespace: {path.name}" for path in folder.glob(f"tw-{os.getpid()}-*")} if folder.exists() else set()
