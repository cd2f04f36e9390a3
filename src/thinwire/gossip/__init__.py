"""Gossip: decentralised training, where replicas mix their weights with their neighbours' on any graph."""

from thinwire.gossip import graphs
from thinwire.gossip.gossip import Gossip
from thinwire.gossip.mixers.choco import Choco
from thinwire.gossip.mixers.deepsqueeze import DeepSqueeze
from thinwire.gossip.mixers.dpsgd import DPSGD
from thinwire.gossip.mixers.powergossip import PowerGossip
from thinwire.gossip.simulation import GossipSimulation
from thinwire.gossip.transport import DeadRank

__all__ = ["DPSGD", "Choco", "DeadRank", "DeepSqueeze", "Gossip", "GossipSimulation", "PowerGossip", "graphs"]
