"""The command: what it says without PyTorch, what `list` and `repro` show, and how mistakes are told."""

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import ClassVar

import pytest
from typer.testing import CliRunner

import thinwire as tw
from thinwire import cli, schemes
from thinwire.core.scheme import Scheme
from thinwire.lab import doctor, listing
from thinwire.lab.repro import papers


def words(each):
    return " ".join(each) if isinstance(each, list) else ""


def command(*arguments):
    """Exit code, lines, whether it met PyTorch, errors: of the command in a terminal of 80 columns."""
    script = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules))
from thinwire.__main__ import main
main()
"""
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, env={"COLUMNS": "80"}
    )
    *said, met = run.stdout.splitlines()
    return run.returncode, said, ast.literal_eval(met), run.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Usage: "),
        (["--help"], "whether compression pays"),
        (["--version"], f"thinwire {metadata.version('thinwire')}"),
        (["compare", "--help"], "[default: 3]"),
        (["list", "--help"], "NAME"),
        (["repro"], "Truncated Non-Uniform Quantization for Distributed SGD"),
        (["repro", "--help"], "Truncated Non-Uniform Quantization for Distributed SGD"),
    ],
    ids=words,
)
def test_help_and_version_do_not_wait_for_torch(arguments, says):
    code, said, met_torch, error = command(*arguments)
    assert code == 0 and error == "" and says in "\n".join(said)
    assert not met_torch


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["comapre"], "No such command 'comapre'. Did you mean 'compare'?"),
        (["list", "--jsn", "x"], "--json"),
        (["compare", "--seeds", "few"], "Invalid value for '--seeds'"),
        (["report"], "Missing argument"),
    ],
    ids=words,
)
def test_what_the_parser_refuses_is_one_line_and_does_not_wait_for_torch(arguments, says):
    code, said, met_torch, error = command(*arguments)
    assert code == 2 and not said and error.startswith("thinwire: ") and says in error and error.count("\n") == 1
    assert not met_torch


def test_advice_says_something_before_it_waits_for_torch():
    script = "import sys; sys.modules['torch'] = None; from thinwire.__main__ import main; main()"
    run = subprocess.run([sys.executable, "-c", script, "advise"], capture_output=True, text=True, timeout=60)
    assert run.returncode and "torch" in run.stderr and run.stdout.startswith("advise: starting")


def test_the_first_public_name_brings_all_of_them():
    script = "import sys, thinwire as tw; assert 'torch' not in sys.modules; tw.QSGD; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert all(getattr(tw, name) is not None for name in tw.__all__) and set(tw.__all__) <= set(dir(tw))
    assert tw.__version__ == metadata.version("thinwire")
    with pytest.raises(AttributeError, match="module 'thinwire' has no attribute 'QSDG'"):
        tw.QSDG  # noqa: B018


def test_without_the_lab_the_command_says_what_to_install():
    script = "import sys; sys.modules['typer'] = None; from thinwire.__main__ import main; main()"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert "needs typer" in run.stderr and "pip install 'thinwire[lab]'" in run.stderr


def said(*arguments):
    run = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"})
    assert run.exit_code == 0, run.output
    return run.output.splitlines()


def test_the_list_has_every_name_under_its_family_within_80_columns():
    lines = said("list")
    assert max(map(len, lines)) <= 80 and not [line for line in lines if "…" in line]
    family, found = None, {}
    for line in lines:
        word = line.split()[0] if line.strip() else ""
        if not line.startswith(" ") and word:
            family = next((name for name in listing.FAMILIES if line.startswith(name)), None)
        elif family and line.startswith("  ") and line[2] != " ":
            found[word] = family
    assert found == {name: listing.family(cls) for name, cls in listing.everything().items()}
    assert found["qsgd"] == "quantisers" and found["topk"] == "sparse" and found["choco"] == "mixers"
    assert len(lines) < 2.5 * len(found) + len(listing.FAMILIES)  # a line or two each


def test_one_scheme_is_shown_with_its_options_and_what_it_sends(tmp_path):
    text = " ".join(" ".join(said("list", "qsgd(bits=2)", "--json", str(tmp_path / "x.json"))).split())
    assert "bits 4 lower => fewer bytes, more error" in text and "block 1024 lower => less error" in text
    row = json.loads((tmp_path / "x.json").read_text())
    assert row["spec"] == "qsgd(bits=2, block=1024, range='max')"
    assert row["bits_per_element"] == 2 + 32 / 1024
    assert row["bits_by_level"] == {f"{bits}": bits + 32 / 1024 for bits in range(1, 9)}


def test_mixers_and_controllers_are_shown_too():
    assert "levels_at needed" in " ".join(" ".join(said("list", "schedule")).split())
    assert any(line.startswith("factor_rank") for line in said("list", "powergossip"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "qsdg"], "unknown name 'qsdg' (did you mean 'qsgd'?)"),
        (["list", "qsgd(bit=2)"], "qsgd has no option 'bit' (did you mean 'bits'?)"),
        (["repro", "utilty"], "unknown reproduction 'utilty' (did you mean 'utility'?)"),
    ],
    ids=words,
)
def test_unknown_names_are_one_line_with_the_nearest(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thinwire", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == "" and told.err.count("\n") == 1 and says in told.err


def test_the_doctor_shows_what_to_type_as_it_is_typed(monkeypatch):
    """Square brackets are not taken for colours."""
    found = [doctor.Finding("kernels", "none [yet]", False, "pip install thinwire[gpu]")]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    text = " ".join(said("doctor"))
    assert "none [yet]" in text and "pip install thinwire[gpu]" in text


@pytest.mark.parametrize("name", listing.everything())
def test_every_option_says_what_it_does(name):
    """The comment beside a field is what `thinwire list` shows."""
    cls = listing.everything()[name]
    assert [option["name"] for option in listing.options(cls) if not option["direction"]] == []
    if issubclass(cls, Scheme):
        assert cls.family in listing.FAMILIES and cls.family != "others"


def test_a_scheme_of_ones_own_is_listed_among_the_others():
    @tw.register
    @dataclass(frozen=True)
    class Whole(tw.FP32):
        times: int = 1  # higher => the same again

        family: ClassVar[str] = "others"
        summary: ClassVar[str] = "my own"

    try:
        row = listing.describe("whole")
        assert row["family"] == "others" and row["bits_per_element"] == 32
        assert row["options"] == [
            {"name": "times", "default": 1, "needed": False, "direction": "higher => the same again"}
        ]
    finally:
        del schemes._registered["whole"]


def test_bits_are_those_of_a_message():
    assert listing.bits_per_element(tw.FP16()) == 16
    assert listing.bits_per_element(tw.QSGD(bits=4), 8) == 8 + 32 / 1024
    assert listing.bits_per_element(tw.RandomK(density=0.5, values="fp32")) == pytest.approx(16, rel=0.01)


def test_every_reproduction_is_of_a_paper_and_is_there():
    for name, paper in papers.PAPERS.items():
        module = __import__(f"thinwire.lab.repro.{name}", fromlist=["parts"])
        assert callable(module.parts) and paper.parts and paper.title and paper.authors
        assert 0 < paper.quick_seeds <= paper.full_seeds
