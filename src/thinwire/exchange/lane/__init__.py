"""Lanes hold conversations over process groups, in an order that all ranks share.

Collectives must start in the same order on every rank, whatever each rank's timing, so a lane's order depends only on
the order in which jobs are submitted and on which is the last of its step. `threaded` has a thread of its own, for
CPUs; `streamed` has a stream of its own, for accelerators.
"""

from thinwire.exchange.lane.lane import DEPTH, Done, Job, Lane, Rounds
from thinwire.exchange.lane.staging import CudaStage, Landings, Stage, staged
from thinwire.exchange.lane.streamed import CudaSide, Side, Streamed
from thinwire.exchange.lane.threaded import Threaded, close_at_exit

__all__ = [
    "DEPTH", "CudaSide", "CudaStage", "Done", "Job", "Landings", "Lane", "Rounds", "Side", "Stage", "Streamed",
    "Threaded", "close_at_exit", "staged",
]  # fmt: skip
