"""The runner of `make torch-tests` on three of PyTorch's tests, and how it tells what fails by nature from a defect."""

from proof import torch_tests
from proof.torch_tests import EXACT, Result, findings
from thinwire.lab.runs import launch

COMPARES, HOOKED, NEITHER = (
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_ddp_namedtuple",
)


def test_three_of_pytorchs_tests_plain_and_attached():
    results = {variant: torch_tests.run_all([COMPARES, HOOKED, NEITHER], variant) for variant in ("plain", "fp32")}
    results["qsgd"] = torch_tests.run_all([COMPARES], "qsgd")
    results[EXACT] = torch_tests.run_all([COMPARES], EXACT)
    assert {result.how for result in results["plain"].values()} == {"passed"}
    found = {(finding.name, finding.variant): finding for finding in findings(results)}
    assert set(found) == {(HOOKED, "fp32"), (COMPARES, "qsgd")}
    assert "hook of its own" in found[HOOKED, "fp32"].why and "8 bits" in found[COMPARES, "qsgd"].why
    assert not any(finding.ours for finding in found.values())


def test_what_fails_exact_too_is_a_defect():
    broken = Result("failed", "KeyError: 'w'")
    results = {"plain": {"a": Result("passed")}, "fp32": {}, "qsgd": {"a": broken}, EXACT: {"a": broken}}
    [finding] = findings(results)
    assert finding.ours and finding.why == "KeyError: 'w'"
    results["fp32"], results["qsgd"] = {"a": broken}, {}
    assert [finding.ours for finding in findings(results)] == [True]


def test_what_fails_plain_is_not_counted():
    results = {"plain": {"a": Result("failed"), "b": Result("skipped")}, "fp32": {"a": Result("failed")}, "qsgd": {}}
    assert findings(results) == []


def names(place):
    return torch_tests.names()


def test_every_test_that_makes_a_model_is_found():
    """In a process of its own: PyTorch's tests want an environment."""
    [names_found] = launch.on_ranks(names, 1)
    assert {COMPARES, HOOKED, NEITHER, *torch_tests.BY_NATURE} < set(names_found), "some by what they call"
    assert "test_all_reduce_sum" not in names_found
