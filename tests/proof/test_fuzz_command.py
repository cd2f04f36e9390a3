"""A little of `make fuzz`, in this process: so `make sanitize` can run it under ASan, too."""

import contextlib
import os
import random
import signal

import pytest

from proof import fuzz, mutate
from proof.targets import Target, every_target

TARGETS = every_target()
NAMES = list(TARGETS)
INPUTS = 60  # each, about 2,000 in all


def check(name, numbers):
    with contextlib.closing(TARGETS[name]()) as target:
        found = fuzz.feed(target, 0, numbers)
    assert not found.failures, f"{len(found.failures)} of {found.inputs}, such as {next(iter(found.failures.items()))}"
    assert found.refused and found.taken + found.refused == found.inputs


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_taken_or_refused_by_value_error(name):
    check(name, range(INPUTS))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_many_inputs_are_taken_or_refused_by_value_error(name):
    check(name, range(INPUTS, 5000))


class Crashing(Target):
    """Its seventh input ends the process, its ninth is another exception."""

    name = "crashing"

    def make(self, chance):
        return chance.random()

    def take(self, given):
        numbers = {fuzz.made(self, 5, number): number for number in range(12)}
        if numbers[given] == 7:
            os.kill(os.getpid(), signal.SIGSEGV)
        if numbers[given] == 9:
            raise KeyError("nine")
        raise ValueError("refused")


def test_a_crash_is_reported_with_its_number_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "every_target", lambda: {"crashing": Crashing})
    monkeypatch.setattr(fuzz, "_process", _process)
    found = fuzz.in_processes("crashing", 5, range(12), tmp_path, lambda count: None)
    assert found.inputs == 12 and found.refused == 3, "those before the crash are not counted as refused"
    assert "SIGSEGV" in found.failures[7] and "KeyError" in found.failures[9] and len(found.failures) == 2


def _process(place, name, seed, numbers, diary):
    fuzz.every_target = lambda: {"crashing": Crashing}
    return PLAIN(place, name, seed, numbers, diary)


PLAIN = fuzz._process


def test_an_input_follows_from_seed_target_and_number():
    target = TARGETS["frames"]()
    assert fuzz.made(target, 1, 2) == fuzz.made(target, 1, 2) != fuzz.made(target, 1, 3)


def test_a_mutation_that_keeps_the_length_keeps_it():
    for seed in range(300):
        assert len(mutate.changed_bytes(bytes(20), random.Random(seed), others=b"abc", same_length=True)) == 20
