"""thinwire trains PyTorch models over thin wires."""

from thinwire.ddp import Wire, attach
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.simulation import Simulation
from thinwire.schemes import parse
from thinwire.schemes.cast import BF16, FP16, FP32
from thinwire.schemes.qsgd import QSGD
from thinwire.server import join

__all__ = ["BF16", "FP16", "FP32", "QSGD", "AllReduce", "Simulation", "Wire", "attach", "join", "parse"]
