"""The command around the reproductions; what each measures is tested beside it."""

import importlib
import json

import pytest
from typer.testing import CliRunner

from thinwire.cli import app
from thinwire.lab.repro import regtopk, tnq
from thinwire.lab.repro.claims import OURS, Claim, Listing
from thinwire.lab.repro.papers import PAPERS
from thinwire.lab.tasks import datasets


def measure(found):
    found.progress("measuring")
    for verdict, title in (("level", "less is more"), ("holds", "one is one")):
        measured = f"{found.seeds} of 5"
        found.claims.append(
            Claim(title, measured, expected="5 of 5", verdict=verdict, source=OURS, reason="too little")
        )
    found.tables.append(Listing("Errors", ["scheme", 7], [["a_scheme_with_a_very_long_name" * 3, 0.5]]))


def stop(found):
    with found.stop:
        raise KeyboardInterrupt


def measured(quick, data):
    return {"errors": measure}


def test_a_reproduction_is_shown_whole_and_kept_with_what_it_ran_on(monkeypatch, tmp_path):
    monkeypatch.setattr(tnq, "parts", measured)
    file = tmp_path / "repro.json"
    said = CliRunner().invoke(app, ["repro", "tnq", "--quick", "--json", str(file)], env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert said.output.count("a_scheme") == 3
    narrow = CliRunner().invoke(app, ["repro", "tnq", "--quick"], env={"COLUMNS": "40"}).output
    assert "…" not in narrow  # a long name is folded, never cut
    assert "less is more" in said.output and "level" in said.output and "ours" in said.output
    assert "level: less is more: too little" in said.output and "one is one: too little" not in said.output
    kept = json.loads(file.read_text())["tnq"]
    assert kept["quick"] is True and kept["seeds"] == 2 and kept["claims"][0]["measured"] == "2 of 5"
    assert kept["tables"][0]["columns"] == ["scheme", 7] and kept["claims"][0]["verdict"] == "level"
    assert [claim.get("reason") for claim in kept["claims"]] == ["too little", None]
    assert kept["machine"] and kept["versions"]["torch"] and kept["created"]


def test_of_all_reproductions_those_before_a_failure_are_kept(monkeypatch, tmp_path):
    def fail(found):
        raise RuntimeError("a worker died")

    def broken(quick, data):
        return {"toy": measure, "images": fail}

    monkeypatch.setattr(tnq, "parts", measured)
    monkeypatch.setattr(regtopk, "parts", broken)
    file = tmp_path / "repro.json"
    assert CliRunner().invoke(app, ["repro", "all", "--json", str(file)]).exit_code != 0
    kept = json.loads(file.read_text())
    assert list(kept) == ["tnq", "regtopk"] and kept["regtopk"]["parts"] == ["toy"]


def test_parts_are_run_by_themselves_and_none_after_a_stop(monkeypatch, tmp_path):
    monkeypatch.setattr(regtopk, "parts", lambda quick, data: {"regression": stop, "toy": measure, "images": measure})
    file = tmp_path / "repro.json"
    given = ["repro", "regtopk", "--json", str(file)]
    assert CliRunner().invoke(app, [*given, "--part", "images", "--part", "toy"]).exit_code == 0
    kept = json.loads(file.read_text())["regtopk"]
    assert kept["parts"] == ["toy", "images"] and len(kept["claims"]) == 4 and not kept["stopped"]
    said = CliRunner().invoke(app, given)
    kept = json.loads(file.read_text())["regtopk"]
    assert kept["parts"] == ["regression"] and kept["stopped"] and "stopped: only what was finished" in said.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["regtopk", "--part", "toys"], "no part 'toys' (did you mean 'toy'?); known: regression, toy"),
        (["utility", "--part", "text"], "no part 'text' without --data; there are costs, images"),
        (["mqgrad", "--quick", "--part", "cnn"], "no part 'cnn' with --quick; there are 60mbit"),
        (["all", "--part", "toy"], "part 'toy' of all reproductions"),
    ],
)
def test_a_part_that_is_not_there_is_a_mistake_that_names_those_that_are(given, said):
    failure = CliRunner().invoke(app, ["repro", *given]).exception
    assert isinstance(failure, ValueError) and said in str(failure)


@pytest.mark.parametrize("name", PAPERS)
def test_the_parts_that_are_listed_are_those_there_are(name, tmp_path, monkeypatch):
    for file in ("fashion-mnist/train-images-idx3-ubyte.gz", "cifar-10-batches-bin/test_batch.bin", "train.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    for reader in ("fashion_mnist", "cifar10"):
        monkeypatch.setattr(datasets, reader, lambda folder: None)
    module = importlib.import_module(f"thinwire.lab.repro.{name}")
    assert tuple(module.parts(False, tmp_path)) == PAPERS[name].parts
    assert set(module.parts(True, None)) < set(PAPERS[name].parts) or name == "tnq"
