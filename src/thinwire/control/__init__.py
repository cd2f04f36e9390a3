"""One file per controller. `parse` makes one of spec text such as "fixed(level=4)"; new files are found."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
from dataclasses import fields
from functools import cache

from thinwire.control.controller import Controller, Observation

__all__ = ["Controller", "Observation", "parse", "registry"]


@cache
def registry() -> dict[str, type[Controller]]:
    """Every controller by its spec name, sorted."""
    found: dict[str, type[Controller]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for thing in vars(module).values():
            own = isinstance(thing, type) and issubclass(thing, Controller) and thing.__module__ == module.__name__
            if own and not thing.__abstractmethods__:
                found[thing.__name__.lower()] = thing
    return dict(sorted(found.items()))


def parse(spec: str | Controller) -> Controller:
    """The controller that `spec` describes. Nothing is evaluated: options are literals."""
    if isinstance(spec, Controller):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a controller is spec text such as 'fixed(level=4)' or a Controller, got {spec!r}")
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"cannot read the controller {spec!r}; it looks like 'fixed(level=4)'") from None
    call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"cannot read the controller {spec!r}; it looks like 'fixed(level=4)', options by name")
    known, name = registry(), call.func.id.lower()
    if name not in known:
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown controller {name!r}{hint}; known: {', '.join(known)}")
    accepted = [f.name for f in fields(known[name]) if f.init]  # type: ignore[arg-type]
    options = {}
    for keyword in call.keywords:
        if keyword.arg not in accepted:
            raise ValueError(f"{name} has no option {keyword.arg!r}; known: {', '.join(accepted)}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ValueError(f"{name}: {keyword.arg} must be a plain value, got {ast.unparse(keyword.value)}") from None
    return known[name](**options)
