"""Links, hosts and buckets' journeys with round numbers, for the cost model."""

from thinwire.lab.cost.model import FLOATS, BucketTrace, Host, Link, LinkCost, Message, Turn

ROOMY = Host(cores=8)  # every thread has a core of its own
CROWDED = Host(cores=2, workers=4)


def a_link(latency=0.0, per_byte=1.0, processor=0.0, short=0.0):
    return Link(4, {FLOATS: LinkCost(latency, per_byte, processor, short)})


def a_talk(ready, *turns):
    """A bucket whose lane encodes and sends, turn by turn: (seconds, bytes, bytes, ...)."""
    return BucketTrace(ready, tuple(Turn(encode, tuple(Message(FLOATS, b) for b in sent)) for encode, *sent in turns))
