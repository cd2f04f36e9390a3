"""The cost model on steps with known answers."""

import math

import pytest

from helpers.costs import CROWDED, ROOMY, a_link, a_talk
from thinwire.lab.cost.link import fit
from thinwire.lab.cost.model import FLOATS, Step
from thinwire.lab.cost.replay import break_even, play, predict, predict_rounds


def test_one_bucket_is_computed_encoded_carried_and_decoded_in_turn():
    played = play(Step(10.0, (a_talk(8.0, (1.0, 5.0), (2.0,)),)), a_link(latency=0.5), ROOMY)
    assert played.seconds == pytest.approx(8 + 1 + 5 + 0.5 + 2 + 2)  # the last 2: what training does afterwards
    assert (played.compute_seconds, played.bytes_sent, played.messages) == (pytest.approx(10), 5, 1)
    # Training waited 8.5 s for the lane, which computed 3 s and waited 5.5 s.
    assert played.encode_seconds == pytest.approx(3) and played.wire_seconds == pytest.approx(5.5)
    assert played.bound == "compute"


def test_the_first_buckets_journey_hides_behind_backward():
    step = Step(20.0, (a_talk(5.0, (1.0, 6.0), (1.0,)), a_talk(20.0, (1.0, 2.0), (1.0,))))
    assert play(step, a_link(), ROOMY).seconds == pytest.approx(20 + 1 + 2 + 1)  # decoded while the second travels


def test_what_is_merely_summed_is_encoded_by_training_itself():
    talks = (a_talk(2.0, (1.0, 6.0), (0.5,)), a_talk(10.0, (1.0, 2.0), (0.5,)))
    played = play(Step(10.0, talks, plain=True), a_link(), ROOMY)
    assert played.seconds == pytest.approx(2 + 1 + 8 + 1 + 2 + 0.5)  # the first is decoded while the second travels
    assert played.compute_seconds == pytest.approx(10)
    assert (played.encode_seconds, played.wire_seconds) == (pytest.approx(3), pytest.approx(1.5))


def test_bytes_never_overlap_but_latencies_do_two_at_a_time():
    together = Step(0.0, (a_talk(0.0, (0.0, 3.0, 4.0), (0.0,)),))
    assert play(together, a_link(), ROOMY).seconds == pytest.approx(7)
    assert play(together, a_link(latency=10, per_byte=0.1), ROOMY).seconds == pytest.approx(10.7)
    three = Step(0.0, (a_talk(0.0, (0.0, 0.0, 0.0, 0.0), (0.0,)),))
    assert play(three, a_link(latency=10), ROOMY).seconds == pytest.approx(20)


def test_two_rounds_wait_for_each_other():
    step = Step(0.0, (a_talk(0.0, (1.0, 2.0), (1.0, 3.0), (1.0,)),))
    assert play(step, a_link(latency=0.5), ROOMY).seconds == pytest.approx(1 + 2.5 + 1 + 3.5 + 1)


def test_where_workers_share_cores_encoding_takes_time_from_computing():
    step = Step(10.0, (a_talk(2.0, (4.0, 0.0), (0.0,)), a_talk(10.0, (0.0, 0.0), (0.0,))))
    assert play(step, a_link(), ROOMY).seconds == pytest.approx(10)
    crowded = play(step, a_link(), CROWDED)
    assert crowded.seconds == pytest.approx(14) and crowded.compute_seconds == pytest.approx(14)


def test_moving_bytes_takes_processors_too_and_true_waiting_does_not():
    step = Step(10.0, (a_talk(2.0, (0.0, 4.0), (0.0,)), a_talk(10.0, (0.0, 0.0), (0.0,))))
    assert play(step, a_link(), CROWDED).seconds == pytest.approx(10)
    half = play(step, a_link(processor=0.25), CROWDED)  # a worker has half a core; half of that moves bytes for 4 s
    assert half.seconds == pytest.approx(12)
    latency = play(step, a_link(latency=4, per_byte=0, short=1), CROWDED)  # a quarter of a core for 4 s
    assert latency.seconds == pytest.approx(12 + 4)  # and the last bucket's own latency


def test_a_step_without_buckets_is_its_computation():
    assert play(Step(3.0, ()), a_link(), ROOMY).seconds == pytest.approx(3)


def test_the_typical_step_is_the_median_of_all():
    steps = [Step(seconds, ()) for seconds in (1.0, 2.0, 50.0)]
    assert predict(steps, a_link(), ROOMY).seconds == 2


def test_steps_that_share_an_exchange_share_its_seconds_and_what_hides_them():
    """T = every x step + max(0, exchange - delay x step), by hand."""
    step = Step(10.0, (a_talk(2.0, (1.0, 5.0), (2.0,)), a_talk(10.0, (1.0, 3.0), (2.0,))))
    exchange = 1 + 5 + 3 + 2  # the second is encoded, and the first decoded, while the other travels
    for every, delay in ((1, 0), (4, 0), (8, 1), (8, 2)):
        played = predict_rounds([step], a_link(), ROOMY, every=every, delay=delay)
        assert played.seconds == pytest.approx(10 + max(0, exchange - 10 * delay) / every)
        assert (played.compute_seconds, played.bytes_sent, played.messages) == (10, 8 / every, 2 / every)


def test_another_computation_keeps_the_share_at_which_buckets_are_ready():
    step = Step(4.0, (a_talk(1.0, (1.0,)), a_talk(4.0, (1.0,)))).computing(8.0)
    assert step.compute_seconds == 8 and [talk.ready for talk in step.buckets] == [2, 8]


def test_break_even_is_where_the_two_lines_cross():
    found = break_even(lambda b: 0.3 + 1e6 / b, lambda b: 0.1 + 1e8 / b)
    assert found == pytest.approx((1e8 - 1e6) / 0.2, rel=1e-3)
    assert break_even(lambda b: 2.0, lambda b: 1.0) is None
    assert break_even(lambda b: 1.0, lambda b: 2.0) == math.inf


def test_a_link_at_another_bandwidth_is_no_faster_than_processors():
    link = a_link(per_byte=1.0, processor=1e-9)
    assert link.at(8e6, CROWDED).kinds[FLOATS].seconds_per_byte == pytest.approx(1e-6)
    assert link.at(8e12, CROWDED).kinds[FLOATS].seconds_per_byte == pytest.approx(2e-9)


def test_the_fit_finds_latency_and_bandwidth():
    sizes = (1e3, 1e4, 1e5, 1e6, 1e7)
    found = fit([(n, 2e-3 + n * 1e-8, 5e-4 + n * 1e-9) for n in sizes])
    assert found.latency_seconds == pytest.approx(2e-3) and found.seconds_per_byte == pytest.approx(1e-8)
    assert found.processor_seconds_per_byte == pytest.approx(1e-9, rel=0.1)
    assert found.processor_seconds == pytest.approx(5e-4, rel=0.1)
    falling = fit([(1e3, 5.0, 0.0), (1e6, 1.0, 0.0)])  # nonsense from a disturbed machine stays usable
    assert falling.latency_seconds >= 0 and falling.seconds_per_byte > 0


def test_what_is_faster_on_thick_links_alone_pays_below_none():
    """As fp32 against fp16: nothing to cast, and twice as much to send."""

    def seconds(encode, nbytes):
        return lambda bandwidth: encode + 8 * nbytes / bandwidth

    casts, sends_more = seconds(0.1, 9000), seconds(0.0, 18000)
    assert sends_more(1e12) < casts(1e12) and break_even(sends_more, casts) is None
    assert break_even(casts, sends_more) == pytest.approx(8 * 9000 / 0.1, rel=1e-2)
