"""The public names of thinwire: what `import thinwire as tw` offers. Whoever adds one exports it here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire import checkpoint, control, local
from thinwire.core import theory
from thinwire.ddp import Wire
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.hierarchical import Hierarchical
from thinwire.exchange.simulation import Simulation
from thinwire.front import attach
from thinwire.gossip import DPSGD, Choco, DeadRank, DeepSqueeze, Gossip, GossipSimulation, PowerGossip, graphs
from thinwire.local import LocalSteps
from thinwire.logs import log_to
from thinwire.schemes import parse as scheme
from thinwire.schemes import register
from thinwire.schemes.cast import BF16, FP16, FP32, FP64
from thinwire.schemes.eden import EDEN
from thinwire.schemes.natural import Natural
from thinwire.schemes.nq import NQ
from thinwire.schemes.nuqsgd import NUQSGD
from thinwire.schemes.powersgd import PowerSGD
from thinwire.schemes.qsgd import QSGD
from thinwire.schemes.randomk import RandomK
from thinwire.schemes.regtopk import RegTopK
from thinwire.schemes.signsgd import SignSGD
from thinwire.schemes.terngrad import TernGrad
from thinwire.schemes.thc import THC
from thinwire.schemes.tnq import TNQ
from thinwire.schemes.topk import TopK
from thinwire.schemes.topkc import TopKC
from thinwire.schemes.tq import TQ
from thinwire.server import Role, ServerOptimizer, join

if TYPE_CHECKING:
    from thinwire.lab.cost.advise import advise

__all__ = [
    "BF16", "DPSGD", "EDEN", "FP16", "FP32", "FP64", "NQ", "NUQSGD", "QSGD", "THC", "TNQ", "TQ", "AllReduce", "Choco",
    "DeadRank", "DeepSqueeze", "Gossip", "GossipSimulation", "Hierarchical", "LocalSteps", "Natural", "PowerGossip",
    "PowerSGD", "RandomK", "RegTopK", "Role", "ServerOptimizer", "SignSGD", "Simulation", "TernGrad", "TopK", "TopKC",
    "Wire", "advise", "attach", "checkpoint", "control", "graphs", "join", "local", "log_to", "register", "scheme",
    "theory",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The lab, which needs more than training does (`pip install thinwire[lab]`), is imported when it is first used."""
    if name == "advise":
        from thinwire.lab.cost.advise import advise

        return advise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
