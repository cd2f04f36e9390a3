"""One file per scheme, found by itself. `parse` makes a scheme of spec text such as "qsgd(bits=4)"."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from typing import TypeVar

from thinwire.core import spec as specs
from thinwire.core.scheme import Codec, Scheme

Registered = TypeVar("Registered", bound=type[Scheme])

_registered: dict[str, type[Scheme]] = {}


@cache
def _found() -> dict[str, type[Scheme]]:
    return specs.discover(__name__, __path__, Scheme)


def registry() -> dict[str, type[Scheme]]:
    """Every scheme by its spec name, sorted; then those that were registered."""
    return _found() | _registered


def register(scheme: Registered) -> Registered:
    """Make a scheme of your own known by its name, in lower case: spec text finds it from then on.

    Parameter servers get codecs as spec text, so there every rank registers it, those that serve too.
    """
    if not (isinstance(scheme, type) and issubclass(scheme, Scheme) and is_dataclass(scheme)):
        raise ValueError(f"register() takes a subclass of Scheme that is a dataclass, got {scheme!r}")
    if missing := sorted(getattr(scheme, "__abstractmethods__", ())):
        raise ValueError(f"{scheme.__name__} is not finished: it lacks {', '.join(missing)}")
    name = scheme.__name__.lower()
    if registry().get(name, scheme) is not scheme:
        raise ValueError(f"the name {name!r} is taken by {registry()[name].__module__}.{registry()[name].__name__}")
    _registered[name] = scheme
    return scheme


def parse(spec: str | Scheme) -> Scheme:
    """The scheme that `spec` describes. Nothing is evaluated: options are literals."""
    return specs.make(spec, Scheme, registry(), kind="scheme", example="'qsgd(bits=4)'")


def codec(spec: str | Scheme, *, linear: bool = False) -> Codec:
    """The codec that `spec` describes; ValueError for schemes that are more than one message.

    linear: messages are added as they come, so those that mean something only all together are refused, too.
    """
    parsed = parse(spec)
    if not isinstance(parsed, Codec):
        known = ", ".join(name for name, scheme in registry().items() if issubclass(scheme, Codec))
        raise ValueError(f"{parsed.spec} is a conversation of the whole group, not one message; accepted: {known}")
    if linear and not parsed.linear:
        raise ValueError(f"{parsed.spec}: here each message is added by itself, and it needs all of them at once")
    return parsed
