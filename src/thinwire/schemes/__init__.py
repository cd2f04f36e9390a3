"""One file per scheme, found by itself. `parse` makes a scheme of spec text such as "qsgd(bits=4)"."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
from dataclasses import fields
from functools import cache

from thinwire.scheme import Scheme


@cache
def registry() -> dict[str, type[Scheme]]:
    """Every scheme by its spec name, sorted."""
    found: dict[str, type[Scheme]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for thing in vars(module).values():
            own = isinstance(thing, type) and issubclass(thing, Scheme) and thing.__module__ == module.__name__
            if own and not thing.__abstractmethods__ and not thing.__name__.startswith("_"):
                found[thing.__name__.lower()] = thing
    return dict(sorted(found.items()))


def parse(spec: str | Scheme) -> Scheme:
    """The scheme that `spec` describes. Nothing is evaluated: options are literals."""
    if isinstance(spec, Scheme):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a scheme is spec text such as 'qsgd(bits=4)' or a Scheme, got {spec!r}")
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"cannot read the scheme {spec!r}; it looks like 'qsgd(bits=4)'") from None
    call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"cannot read the scheme {spec!r}; it looks like 'qsgd(bits=4)', options by name")

    known = registry()
    name = call.func.id.lower()
    if name not in known:
        raise ValueError(f"unknown scheme {name!r}{_hint(name, known)}; known: {', '.join(known)}")
    cls = known[name]
    accepted = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    options = {}
    for keyword in call.keywords:
        if keyword.arg not in accepted:
            listed = ", ".join(accepted) or "none"
            raise ValueError(
                f"{name} has no option {keyword.arg!r}{_hint(keyword.arg or '', accepted)}; known: {listed}"
            )
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ValueError(f"{name}: {keyword.arg} must be a plain value, got {ast.unparse(keyword.value)}") from None
    return cls(**options)


def _hint(word: str, known) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
