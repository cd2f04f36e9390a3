"""One file per controller. `parse` makes one of spec text such as "fixed(level=4)"; new files are found."""

from __future__ import annotations

from functools import cache

from thinwire.control.controller import Controller, Observation
from thinwire.control.fixed import Fixed
from thinwire.control.mqgrad import MQGrad
from thinwire.control.normrule import NormRule
from thinwire.control.schedule import Schedule
from thinwire.control.uniform import Uniform
from thinwire.core import spec as specs

__all__ = ["Controller", "Fixed", "MQGrad", "NormRule", "Observation", "Schedule", "Uniform", "parse", "registry"]


@cache
def registry() -> dict[str, type[Controller]]:
    """Every controller by its spec name, sorted."""
    return specs.discover(__name__, __path__, Controller)


def parse(spec: str | Controller) -> Controller:
    """The controller that `spec` describes. Nothing is evaluated: options are literals."""
    return specs.make(spec, Controller, registry(), kind="controller", example="'fixed(level=4)'")
