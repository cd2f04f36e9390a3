"""`thinwire bench --schemes`: a step of one worker, timed against a copy of the gradient."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from thinwire import kernels
from thinwire.cli import app
from thinwire.kernels import backends
from thinwire.lab import doctor
from thinwire.lab.bench import growth, schemes
from thinwire.lab.bench.breakdown import OPERATIONS, SMALL, Breakdown
from thinwire.lab.tasks import models


@pytest.fixture(scope="module")
def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 32))


def test_buckets_are_those_of_ddp():
    """784-2048-2048-10: the first bucket closes with the matrix that fills a megabyte, the second with the rest."""
    first, second = schemes.buckets_of(models.mlp(2048))
    assert [segment.shape for segment in first.segments] == [(10,), (10, 2048), (2048,), (2048, 2048)]
    assert [segment.shape for segment in second.segments] == [(2048,), (2048, 784)]


def test_every_scheme_has_a_row(model):
    rows = schemes.benchmark(schemes.SCHEMES, (1,), repeats=1, model=model)
    assert [row.scheme for row in rows] == list(schemes.SCHEMES)
    for row in rows:
        assert row.milliseconds > 0 and row.memcpys > 0
        assert set(row.operations) == set(OPERATIONS)
        assert sum(row.operations.values()) == pytest.approx(row.memcpys)


def test_a_step_is_the_pipeline_s_own(model):
    """Two equal workers: the mean is the gradient, but for what the scheme loses."""
    stage = schemes.Stage(model, "fp32", 2)
    stage.copy()
    stage.converse()
    assert torch.allclose(stage._flat, stage._source)
    assert stage.lane.watch is None


def test_operations_are_booked_by_what_they_do():
    breakdown = Breakdown()
    before = kernels.all_finite
    with breakdown.watching():
        x, small = torch.ones(2000), torch.ones(1000)
        kernels.all_finite(x)
        x.copy_(x + 1)
    assert kernels.all_finite is before and small.nbytes < SMALL
    assert breakdown.seconds["statistics"] > 0 and breakdown.seconds["copy"] > 0 and breakdown.seconds["python"] > 0
    assert breakdown.allocated == 16000  # x, and x + 1; what is small is not counted


@pytest.fixture(scope="module")
def wide_model():
    return models.mlp(1024)  # so that even one number for each block is more than SMALL


@pytest.mark.parametrize("scheme", [*schemes.SCHEMES, "tq(bits=4)", "nq(bits=4)", "terngrad", "natural"])
def test_a_step_allocates_nothing(wide_model, scheme):
    """After the first few, that is: all that a scheme needs is kept, by its bucket's scratch or by its thread."""
    stage = schemes.Stage(wide_model, scheme, 3)
    try:
        for _ in range(2):
            stage.copy()
            stage.converse()
        breakdown = Breakdown()
        stage.lane.watch = breakdown.watching
        stage.converse()
    finally:
        stage.close()
    assert breakdown.allocated == 0


def test_command_writes_its_tables(tmp_path, monkeypatch, model):
    monkeypatch.setattr(schemes.models, "mlp", lambda width: model)
    file = tmp_path / "rows.json"
    spec = "qsgd(bits=4)"
    result = CliRunner().invoke(app, ["bench", "--schemes", "--scheme", spec, "--repeats", "1", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert re.search(r"qsgd\(bits=4\).* \d", result.output)
    assert max(len(line) for line in result.output.splitlines()) <= 100
    rows = json.loads(file.read_text())["rows"]
    assert {row["scheme"] for row in rows} == {spec} and all(row["memcpys"] > 0 for row in rows)


def test_costs_are_shown_per_entry_as_models_and_groups_grow():
    rows = growth.grow(["fp16", "topk"], sizes=(1, 2), workers=(2, 3), repeats=1)
    points = [(row.weights, row.workers) for row in rows if row.scheme == "topk"]
    million = growth.WIDTH**2
    assert points == [(million, 2), (2 * million, 2), (2 * million, 3)]
    assert all(row.nanoseconds > 0 and row.memcpys > 0 for row in rows)
    assert growth.table(rows).row_count == 2


def test_options_that_do_not_belong_together_are_refused():
    for options in (
        ["--grow"],
        ["--schemes", "--grow", "--workers", "3"],
        ["--scheme", "qsgd"],
        ["--schemes", "--only", "top-k"],
        ["--schemes", "--scheme", "nonsense"],
    ):
        result = CliRunner().invoke(app, ["bench", *options])
        assert isinstance(result.exception, ValueError), options


def test_without_a_card_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", "--device", "cuda"])
    assert done.exit_code != 0
    assert "there is no CUDA device here" in str(done.exception) + done.output
    for arguments, message in (
        (["--device", "mps"], "must be cpu or cuda"),
        (["--device", "cuda", "--schemes"], "kernels"),
    ):
        done = CliRunner().invoke(app, ["bench", *arguments])
        assert done.exit_code != 0 and message in str(done.exception) + done.output


def test_doctor_says_what_does_every_operation_on_every_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {finding.what: finding for finding in doctor.examine()}
    native, triton = doctor.backends_of("cpu"), doctor.backends_of("cuda")
    assert native["top_k"] == "native" and native["random_u32"] == "reference" and triton["top_k"] == "triton"
    # A copy is PyTorch's, Laplace blocks take two passes there, and sums of halves are for gloo.
    others = {"keep_", "quantize_laplace", "sum_halves"}
    assert {name for name, backend in triton.items() if backend != "triton"} == others
    assert f"{len(triton) - len(others)} triton" in found["operations on cuda"].found
    assert found["operations on cuda"].found.startswith("would take")
    monkeypatch.setattr(backends, "FAST", {"cpu": "native", "cuda": "missing"})
    backends._found.cache_clear()
    try:
        finding = {finding.what: finding for finding in doctor.examine()}["operations on cuda"]
        assert finding.found == "would take all reference" and "thinwire[gpu]" in finding.follows
    finally:
        monkeypatch.undo()
        backends._found.cache_clear()
