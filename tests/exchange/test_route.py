"""How a Mean travels where nobody said: by bytes, or by time where the link is known."""

import pytest
import torch

import thinwire as tw
from thinwire.core.bucket import Bucket
from thinwire.core.request import Mean
from thinwire.exchange import arithmetic
from thinwire.exchange.allreduce import AllReduce
from thinwire.schemes import parse

BUCKET = Bucket.of(torch.zeros(100_000), workers=8)
MEAN = Mean(parse("qsgd(bits=4)"), BUCKET, 4)


def seconds(route, link, workers):
    """A gather passes every payload on; a two-shot sends parts to their owners, then passes on every part's mean."""
    codec = MEAN.codec
    around = workers - 1
    if route == "gather":
        return around * (link.latency + arithmetic.aligned(codec.nbytes(BUCKET.layout, 4)) * 8 / link.bandwidth)
    parts = arithmetic.part_bytes(codec, BUCKET.layout, workers, 4)
    there = link.latency + (sum(parts) - min(parts)) * 8 / link.bandwidth
    return there + around * (link.latency + max(parts) * 8 / link.bandwidth)


@pytest.mark.parametrize("workers", [3, 8, 64])
@pytest.mark.parametrize("latency", [0.0, 1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e10])
def test_the_sooner_one_is_taken(workers, latency, bandwidth):
    link = arithmetic.Link(latency, bandwidth)
    found = arithmetic.route_for(MEAN, "auto", workers, link)
    other = "gather" if found == "two-shot" else "two-shot"
    assert seconds(found, link, workers) <= seconds(other, link, workers)


def test_both_are_taken_somewhere_and_without_a_link_bytes_decide():
    found = {arithmetic.route_for(MEAN, "auto", 8, arithmetic.Link(late, 1e9)) for late in (0.0, 1.0)}
    assert found == {"gather", "two-shot"}
    assert arithmetic.route_for(MEAN, "auto", 8) == "two-shot"
    assert arithmetic.route_for(MEAN, "two-shot", 8, arithmetic.Link(1.0, 1e9)) == "two-shot", "what was said counts"


def test_a_simulation_sends_what_its_link_makes_it():
    tensors = [torch.randn(100_000) for _ in range(8)]
    sent = {}
    for latency in (0.0, 1.0):
        group = tw.Simulation("qsgd(bits=4)", workers=8, link=(latency, 1e9))
        group.reduce(tensors)
        sent[latency] = group.bytes_sent
    assert sent[1.0] > 2 * sent[0.0]


@pytest.mark.parametrize("link", [(-1.0, 1e9), (0.0, 0.0), (0.0, float("inf")), (float("nan"), 1e9)])
def test_links_that_are_none_are_refused(link):
    with pytest.raises(ValueError, match="a link has a latency"):
        AllReduce(link=link)
