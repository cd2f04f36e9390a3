"""Local steps: workers train replicas of their own, and talk every so many steps."""

from __future__ import annotations

from thinwire.local.local import LocalSteps
from thinwire.local.recipes import diloco, sparseloco, streaming

__all__ = ["LocalSteps", "diloco", "sparseloco", "streaming"]
