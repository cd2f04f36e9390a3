"""The notebook runs from top to bottom, shows what it did when it was stored, and reads a record that was measured."""

import json
import re
from pathlib import Path

import pytest

from helpers import notebook
from thinwire.lab.runs.record import Record

FILE = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def ran():
    return notebook.run(FILE)


def shown(cell):
    return [output["output_type"] for output in cell["outputs"]]


def text(cell):
    return "".join(line for output in cell["outputs"] for line in output.get("text", []))


def test_it_is_a_notebook_as_forges_show_it():
    stored = json.loads(FILE.read_text())
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5) and stored["metadata"]["kernelspec"]
    ids = [cell["id"] for cell in stored["cells"]]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[\w-]{1,64}", each) for each in ids)
    for cell in stored["cells"]:
        extra = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | extra


def test_what_is_stored_is_what_it_shows(ran):
    """Pictures and tables where they were; the numbers of a run need not be another machine's."""
    stored = notebook.code_cells(json.loads(FILE.read_text()))
    for before, after in zip(stored, notebook.code_cells(ran), strict=True):
        assert before["execution_count"] == after["execution_count"] and shown(before) == shown(after)
        assert re.sub(r"[\d.,]+", "0", text(before)) == re.sub(r"[\d.,]+", "0", text(after))
    assert sum(shown(cell).count("display_data") for cell in stored) == 4


def test_eight_workers_learn_under_every_scheme(ran):
    table = "".join(text(cell) for cell in notebook.code_cells(ran))
    rows = dict(re.findall(r"^(\S+) +([\d.]+)% +[\d.]+$", table, re.MULTILINE))
    assert len(rows) == 4 and all(float(score) > 50 for score in rows.values())
    assert abs(float(rows["qsgd(bits=4)"]) - float(rows["fp32"])) < 10


def test_the_record_is_that_of_the_command_beside_it():
    """The runs are those that the notebook's command line asks for."""
    sources = "".join(line for cell in json.loads(FILE.read_text())["cells"] for line in cell["source"])
    (command,) = re.findall(r"thinwire compare --task .*", sources)
    record = Record.load(FILE.with_name("quickstart.json"))
    assert [run.plan.name for run in record.runs] == re.findall(r'--scheme "?([^" ]+)', command)
    assert {run.plan.task for run in record.runs} == {re.search(r'--task "(.+?)"', command)[1]}
    assert record.runs[0].plan.network == re.search(r"--network (\S+)", command)[1]
    assert not record.interrupted and all(run.reason is None and run.curve for run in record.runs)
