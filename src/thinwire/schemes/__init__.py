"""One file per scheme, found by itself. `parse` makes a scheme of spec text such as "qsgd(bits=4)"."""

from __future__ import annotations

from functools import cache

from thinwire.core import spec as specs
from thinwire.core.scheme import Scheme


@cache
def registry() -> dict[str, type[Scheme]]:
    """Every scheme by its spec name, sorted."""
    return specs.discover(__name__, __path__, Scheme)


def parse(spec: str | Scheme) -> Scheme:
    """The scheme that `spec` describes. Nothing is evaluated: options are literals."""
    return specs.make(spec, Scheme, registry(), kind="scheme", example="'qsgd(bits=4)'")
