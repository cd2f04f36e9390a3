"""A minute-free `make soak`, and that a leak would not pass."""

import random

import pytest

from proof import soak
from proof.soak import Sample, verdict

DOORS = ["all-reduce", "server"]


@pytest.mark.parametrize("door", DOORS)
def test_a_few_windows_are_measured_on_every_rank(door):
    """Too short for a verdict on memory; threads and descriptors are constant from the first cycle on."""
    for samples in soak.run(door, seconds=0):
        assert len(samples) == soak.FEWEST
        failures = verdict(samples).failures
        assert not [failure for failure in failures if failure.startswith(("threads", "descriptors"))]
        assert samples[-1].resident_bytes > 2**20 and samples[-1].steps > 0


@pytest.mark.full
@pytest.mark.parametrize("door", soak.doors.DOORS)
def test_a_minute_of_every_door_is_flat(door):
    assert [verdict(samples).failures for samples in soak.run(door, seconds=60)] == [[], []]


def made_up(**changes):
    """100 samples of a flat process of 300 MiB, with noise; `changes` add to a field what they say of its place."""
    chance, samples = random.Random(0), []
    for place in range(100):
        fields = {
            "rank": 0, "seconds": 1.0 * place, "steps": 100 * (place + 1),
            "resident_bytes": 300 * 2**20 + chance.randrange(2**18), "threads": 12, "descriptors": 30,
            "step_seconds": 0.005 + 0.001 * chance.random(),
        }  # fmt: skip
        samples.append(Sample(**fields | {name: fields[name] + change(place) for name, change in changes.items()}))
    return samples


def test_what_is_flat_is_flat():
    assert verdict(made_up()).failures == []


def test_warm_up_does_not_count():
    warming = {"resident_bytes": lambda place: -(2**25) * (place < 20), "threads": lambda place: -(place < 20)}
    assert verdict(made_up(**warming)).failures == []


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"resident_bytes": lambda place: 100 * 600 * place}, "memory grew by 4."),  # 600 bytes a step
        ({"threads": lambda place: place // 50}, "threads: between 12 and 13"),
        ({"descriptors": lambda place: place // 10}, "descriptors: between 32 and 39"),
        ({"step_seconds": lambda place: 1e-5 * place**2}, "steps take 4."),
    ],
)
def test_a_leak_is_found(changes, failure):
    [found] = verdict(made_up(**changes)).failures
    assert found.startswith(failure)
