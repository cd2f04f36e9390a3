"""Notices: what the processes of a job leave for each other in its store."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Job:
    """What everybody must have been given alike who takes part."""

    servers: int
    first: int  # how many workers it begins with
    room: int  # for how many there is


class Notices:
    """All that a worker needs to find a job, and a server to find a newcomer."""

    def __init__(self, store: dist.Store, timeout: float) -> None:
        self.store: dist.Store = dist.PrefixStore("thinwire/late", store)
        self._timeout = datetime.timedelta(seconds=timeout)

    def announce(self, job: Job) -> None:
        """The first server does."""
        if self.store.add("jobs", 1) > 1:
            raise ValueError("join(late=True) once in a job: its store has another's notices")
        self.store.set("knocks", "\n")
        self.store.set("job", json.dumps(asdict(job)))

    def job(self) -> Job:
        self._wait("job", "no server came: rank 0 must serve the same job")
        return Job(**json.loads(self.store.get("job")))

    @property
    def begun(self) -> bool:
        return self.store.add("begun", 0) > 0

    def begin(self) -> None:
        self.store.add("begun", 1)

    @property
    def abandoned(self) -> bool:
        return self.store.add("abandoned", 0) > 0

    def abandon(self) -> None:
        """Those who were to begin cannot: the servers need not wait for them."""
        self.store.add("abandoned", 1)

    def tell(self, worker: int, given: Mapping[str, str] | None) -> None:
        """What a worker was given, of those that the job begins with."""
        self.store.set(f"settings/{worker}", json.dumps(given))

    def told(self, worker: int) -> dict[str, str] | None:
        self._wait(f"settings/{worker}", f"worker {worker} did not come")
        found = json.loads(self.store.get(f"settings/{worker}"))
        return None if found is None else dict(found)

    def knock(self, worker: int) -> str:
        """Tell all servers of a newcomer; the name of its connections."""
        name = uuid.uuid4().hex
        self.store.append("knocks", f"{worker} {name}\n")  # type: ignore[attr-defined]  # whole, or not at all
        return name

    def knocks(self, seen: int) -> list[tuple[int, str]]:
        """(worker, the name of its connections) of those that came after the first `seen`."""
        lines = self.store.get("knocks").decode().split("\n")[1:-1]
        return [(int(worker), name) for worker, name in map(str.split, lines[seen:])]

    def another_connection(self) -> dist.Store:
        """To the same store: one that waits for a key keeps all others of its connection waiting."""
        clone = getattr(self.store, "clone", None)  # older PyTorch may lack it
        return self.store if clone is None else clone()

    def _wait(self, key: str, otherwise: str) -> None:
        try:
            self.store.wait([key], self._timeout)
        except RuntimeError as error:  # DistStoreError, too
            raise RuntimeError(f"{otherwise}, within {self._timeout.total_seconds():g} seconds") from error
