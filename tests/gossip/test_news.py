"""Who is dead and which connection merely broke, as news of it goes round: no network needed."""

import pytest

from thinwire.gossip import graphs
from thinwire.gossip.news import News, parents

RANKS = 6


def told_round(everyone, graph, dead=(), cut=()):
    """One round of gossip: neighbours hear each other, and notice who does not answer."""
    messages = {news.rank: news.message() for news in everyone}
    for news in (news for news in everyone if news.rank not in dead):
        news.next_round()
        for other in graph.neighbours(news.rank):
            if other in dead or {news.rank, other} in cut:
                news.add(other)
            else:
                news.read(other, messages[other])


@pytest.fixture
def everyone():
    return [News(rank, RANKS) for rank in range(RANKS)]


def test_a_death_is_known_to_all_and_not_before_an_answer_could_have_come(everyone):
    for _ in range(RANKS):
        told_round(everyone, graphs.ring(RANKS), dead=[2])
        assert all(not news.dead for news in everyone)
    for _ in range(RANKS):
        told_round(everyone, graphs.ring(RANKS), dead=[2])
    assert all(news.dead == {2} for news in everyone if news.rank != 2)


def test_a_broken_connection_is_answered_from_both_ends_in_time(everyone):
    for _ in range(4 * RANKS):
        told_round(everyone, graphs.ring(RANKS), cut=[{2, 3}])
        assert all(not news.dead for news in everyone)
    assert all(news.links == {(2, 3)} and not news.silent for news in everyone)
    assert [news.broken for news in everyone] == [set(), set(), {3}, {2}, set(), set()]


def test_who_lost_a_connection_and_dies_later_is_dead(everyone):
    for _ in range(2 * RANKS):
        told_round(everyone, graphs.ring(RANKS), cut=[{2, 3}])
    for _ in range(2 * RANKS):
        told_round(everyone, graphs.ring(RANKS), dead=[2], cut=[{2, 3}])
    assert all(news.dead == {2} for news in everyone if news.rank != 2)


def test_two_neighbours_that_die_together_are_dead(everyone):
    for _ in range(2 * RANKS):
        told_round(everyone, graphs.ring(RANKS), dead=[2, 3])
    assert all(news.dead == {2, 3} for news in everyone if news.rank not in (2, 3))


def test_a_late_answer_counts():
    """On a graph that changes, an answer may take longer than the longest way."""
    here, there = News(0, 3), News(2, 3)
    here.add(2)
    for _ in range(5):
        here.next_round()
    assert here.dead == {2}
    there.read(0, here.message())
    here.read(1, there.message())
    assert here.dead == set() and here.broken == {2}


@pytest.mark.parametrize("message", [b"\xff\xff", b"\x80\x00", b"\x00\x01"])
def test_news_of_connections_that_there_are_not_is_refused(message):
    """All bits; a rank's connection to itself; a bit past the last pair."""
    with pytest.raises(ValueError, match="rank 1 tells"):
        News(0, 3).read(1, message)


def test_the_tree_is_binary_and_goes_round_broken_connections():
    whole = parents(range(7), lambda i, j: True)
    assert whole == {0: None, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}
    assert parents([0, 3, 4, 6], lambda i, j: {i, j} != {0, 4}) == {0: None, 3: 0, 6: 0, 4: 3}
    assert parents([0, 1, 2], lambda i, j: {i, j} == {1, 2} or 0 not in (i, j)) == {0: None}
    star = parents(range(5), lambda i, j: 0 in (i, j))
    assert star == {0: None, 1: 0, 2: 0, 3: 0, 4: 0}, "more than two children where there is no other way"
