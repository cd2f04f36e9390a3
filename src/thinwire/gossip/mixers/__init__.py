"""One file per mixer, found by itself; `parse` makes one of spec text such as "powergossip(iterations=2)"."""

from __future__ import annotations

from functools import cache

from thinwire.core import spec as specs
from thinwire.gossip.mixer import Mixer


@cache
def registry() -> dict[str, type[Mixer]]:
    """Every mixer by its spec name, sorted."""
    return specs.discover(__name__, __path__, Mixer)


def parse(spec: str | Mixer) -> Mixer:
    """The mixer that `spec` describes. Nothing is evaluated: options are literals, codecs quoted text."""
    example = "'powergossip(factor_rank=1)' or 'choco(codec=\"qsgd(bits=4)\", step=0.4)'"
    return specs.make(spec, Mixer, registry(), kind="mixer", example=example)
