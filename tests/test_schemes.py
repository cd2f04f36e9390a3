"""Spec text: parsed without eval, and every mistake is answered with what is known."""

import pytest

import thinwire as tw
from helpers.specs import every_spec
from thinwire.schemes import parse, registry


@pytest.mark.parametrize("spec", every_spec())
def test_a_spec_is_the_scheme_again(spec):
    scheme = parse(spec)
    assert parse(scheme.spec) == scheme
    assert parse(scheme) is scheme
    assert hash(scheme) == hash(parse(spec))


def test_the_public_names_are_the_registry():
    for name, cls in registry().items():
        assert getattr(tw, cls.__name__) is cls
        assert cls.__name__ in tw.__all__
        assert cls.summary and not cls.summary.endswith("."), name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("qsdg(bits=4)", r"unknown scheme 'qsdg' \(did you mean 'qsgd'\?\); known: .*fp16.*qsgd"),
        ("qsgd(bit=4)", r"qsgd has no option 'bit' \(did you mean 'bits'\?\); known: bits, block"),
        ("fp16(bits=4)", "fp16 has no option 'bits'; known: none"),
        ("qsgd(bits=9)", r"qsgd: bits must be 1\.\.8, got 9"),
        ("qsgd(bits=2.5)", r"qsgd: bits must be 1\.\.8, got 2.5"),
        ("qsgd(block=12)", "qsgd: block must be a positive multiple of 8, got 12"),
        ("qsgd(4)", "options by name"),
        ("qsgd(bits=__import__('os').getpid())", "bits must be a plain value"),
        ("qsgd(**{'bits': 4})", "no option None"),
        ("qsgd(", "cannot read the scheme"),
        ("", "cannot read the scheme"),
        ("a.b()", "cannot read the scheme"),
        (7, "spec text such as"),
    ],
)
def test_mistakes_are_answered(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)
