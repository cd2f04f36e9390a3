"""thinwire trains PyTorch models over thin wires."""

from thinwire.control.fixed import Fixed
from thinwire.control.mqgrad import MQGrad
from thinwire.control.normrule import NormRule
from thinwire.control.random import Random
from thinwire.control.schedule import Schedule
from thinwire.ddp import Wire, attach
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.simulation import Simulation
from thinwire.schemes import parse
from thinwire.schemes.cast import BF16, FP16, FP32
from thinwire.schemes.qsgd import QSGD
from thinwire.server import Role, ServerOptimizer, join

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "QSGD",
    "AllReduce",
    "Fixed",
    "MQGrad",
    "NormRule",
    "Random",
    "Role",
    "Schedule",
    "ServerOptimizer",
    "Simulation",
    "Wire",
    "attach",
    "join",
    "parse",
]
