"""One file per mixer, found by itself; `parse` makes one of spec text such as "powergossip(iterations=2)"."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
from dataclasses import fields
from functools import cache

from thinwire.gossip.mixer import Mixer


@cache
def registry() -> dict[str, type[Mixer]]:
    """Every mixer by its spec name, sorted."""
    found: dict[str, type[Mixer]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for thing in vars(module).values():
            own = isinstance(thing, type) and issubclass(thing, Mixer) and thing.__module__ == module.__name__
            if own and not thing.__abstractmethods__ and not thing.__name__.startswith("_"):
                found[thing.__name__.lower()] = thing
    return dict(sorted(found.items()))


def parse(spec: str | Mixer) -> Mixer:
    """The mixer that `spec` describes. Nothing is evaluated: options are literals, codecs quoted text."""
    if isinstance(spec, Mixer):
        return spec
    example = "it looks like 'powergossip(factor_rank=1)' or 'choco(codec=\"qsgd(bits=4)\", step=0.4)'"
    if not isinstance(spec, str):
        raise ValueError(f"a mixer is spec text or a Mixer, got {spec!r}; {example}")
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"cannot read the mixer {spec!r}; {example}") from None
    call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"cannot read the mixer {spec!r}; {example}, options by name")
    known = registry()
    name = call.func.id.lower()
    if name not in known:
        raise ValueError(f"unknown mixer {name!r}{_hint(name, known)}; known: {', '.join(known)}")
    accepted = [f.name for f in fields(known[name])]
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
    return known[name](**options)


def _hint(word: str, known) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
