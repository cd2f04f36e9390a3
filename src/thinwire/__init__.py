"""Gradient compression for PyTorch: trains models over thin wires.

All it offers is in `thinwire.public`, which is imported, and PyTorch with it, when the first name is used: so the
command can say its help and its version at once.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.public import *  # noqa: F403
    from thinwire.public import __all__ as __all__


def __getattr__(name: str) -> Any:
    """A submodule, or one of the public names."""
    if name == "__version__":
        return metadata.version(__name__)
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(f"{__name__}.{name}"):  # first: modules of the package fetch each other in this way
        return importlib.import_module(f"{__name__}.{name}")
    public = importlib.import_module(f"{__name__}.public")
    if name != "__all__" and name not in public.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(public, name)  # found here from now on
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module(f"{__name__}.public").__all__})
