"""The command around the reproductions; what each measures is tested beside it."""

import json

from typer.testing import CliRunner

from thinwire.cli import app
from thinwire.lab.repro import regtopk, tnq
from thinwire.lab.repro.claims import OURS, Claim, Listing, Reproduction


def measured(quick, data, seeds, progress):
    progress("measuring")
    return Reproduction(
        claims=[Claim("less is more", measured=f"{seeds} of 5", expected="5 of 5", verdict="level", source=OURS)],
        tables=[Listing("Errors", ["scheme", 7], [["a_scheme_with_a_very_long_name" * 3, 0.5]])],
    )


def test_a_reproduction_is_shown_whole_and_kept_with_what_it_ran_on(monkeypatch, tmp_path):
    monkeypatch.setattr(tnq, "reproduce", measured)
    file = tmp_path / "repro.json"
    said = CliRunner().invoke(app, ["repro", "tnq", "--quick", "--json", str(file)], env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert said.output.count("a_scheme") == 3
    narrow = CliRunner().invoke(app, ["repro", "tnq", "--quick"], env={"COLUMNS": "40"}).output
    assert "…" not in narrow  # a long name is folded, never cut
    assert "less is more" in said.output and "level" in said.output and "ours" in said.output
    kept = json.loads(file.read_text())["tnq"]
    assert kept["quick"] is True and kept["seeds"] == 2 and kept["claims"][0]["measured"] == "2 of 5"
    assert kept["tables"][0]["columns"] == ["scheme", 7] and kept["claims"][0]["verdict"] == "level"
    assert kept["machine"] and kept["versions"]["torch"] and kept["created"]


def test_of_all_reproductions_those_before_a_failure_are_kept(monkeypatch, tmp_path):
    def broken(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(tnq, "reproduce", measured)
    monkeypatch.setattr(regtopk, "reproduce", broken)
    file = tmp_path / "repro.json"
    assert CliRunner().invoke(app, ["repro", "all", "--json", str(file)]).exit_code != 0
    assert list(json.loads(file.read_text())) == ["tnq"]
