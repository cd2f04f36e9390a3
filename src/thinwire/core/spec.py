"""Spec text such as "qsgd(bits=4)": how schemes, mixers, controllers and exchanges are named, found and made."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

Kind = TypeVar("Kind")
# ast.parse counts its depth for all threads together, and fails now and then where two call it at once
# (python/cpython#106905, seen with 3.11). A server reads specs in a thread for every worker.
_one_at_a_time = threading.Lock()

# What Python's own reader raises: the last two, and sometimes MemoryError, where brackets are nested too deep.
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class Specced:
    """A dataclass whose fields are the options of its spec text, and whose name is its class's in lower case."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def spec(self) -> str:
        """The spec text that makes this again."""
        options = ", ".join(f"{f.name}={_plain(getattr(self, f.name))!r}" for f in fields(self) if f.init)  # type: ignore[arg-type]
        return f"{self.name}({options})" if options else self.name


def _plain(option: Any) -> Any:
    return option.spec if isinstance(option, Specced) else option


def discover(package: str, path: Iterable[str], base: type[Kind]) -> dict[str, type[Kind]]:
    """Every finished subclass of `base` in a package's modules, by its name in lower case, sorted."""
    found: dict[str, type[Kind]] = {}
    for module_info in pkgutil.iter_modules(path):
        module = importlib.import_module(f"{package}.{module_info.name}")
        for thing in vars(module).values():
            own = isinstance(thing, type) and issubclass(thing, base) and thing.__module__ == module.__name__
            if own and not getattr(thing, "__abstractmethods__", None) and not thing.__name__.startswith("_"):
                found[thing.__name__.lower()] = thing  # type: ignore[assignment]
    return dict(sorted(found.items()))


def make(spec: str | Kind, base: type[Kind], known: Mapping[str, type[Kind]], *, kind: str, example: str) -> Kind:
    """The `kind` that `spec` describes, or `spec` itself if it is one. Nothing is evaluated: options are literals."""
    if isinstance(spec, base):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a {kind} is spec text such as {example} or a {base.__name__}, got {spec!r}")
    try:
        with _one_at_a_time:
            tree = ast.parse(spec.strip(), mode="eval").body
    except _UNREADABLE:
        raise ValueError(f"cannot read the {kind} {spec[:200]!r}; it looks like {example}") from None
    call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"cannot read the {kind} {spec[:200]!r}; it looks like {example}, options by name")
    name = call.func.id.lower()
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}{hint(name, known)}; known: {', '.join(known)}")
    return known[name](**_options(name, call.keywords, known[name]))


def _options(name: str, keywords: Iterable[ast.keyword], cls: type) -> dict[str, Any]:
    accepted = [f.name for f in fields(cls) if f.init]
    options: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg is None or keyword.arg not in accepted:
            listed = ", ".join(accepted) or "none"
            near = hint(keyword.arg or "", accepted)
            raise ValueError(f"{name} has no option {keyword.arg!r}{near}; known: {listed}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except _UNREADABLE:
            raise ValueError(f"{name}: {keyword.arg} must be a plain value, such as 4, 0.1 or 'fp16'") from None
    needed = [f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]
    if missing := [option for option in needed if option not in options]:
        raise ValueError(f"{name} needs {', '.join(missing)}")
    return options


def hint(word: str, known: Iterable[str]) -> str:
    """A question after the nearest name, to go into an error; nothing where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
