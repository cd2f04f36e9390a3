"""The page: every scheme's curve and verdict, nothing fetched, no error in a browser."""

import re
import subprocess

import pytest

from helpers.needs import chromium
from helpers.runs import FP16, made_up, record_of
from thinwire.lab.report import report, table


@pytest.fixture
def record():
    return record_of(
        FP16,
        made_up("fp32", 4.0, [0.5, 0.8, 0.85]),
        made_up("qsgd(bits=4)", 0.5, [0.5, 0.8, 0.86]),
        made_up("qsgd(bits=4)", 0.6, [0.4, 0.8, 0.84], seed=1),
        made_up("qsgd(bits=4)", 0.5, [0.5, 0.8, 0.86], controller="mqgrad", levels=[2, 4, 8]),
        made_up("powergossip", 0.5, [0.5, 0.8, 0.86], exchange="gossip"),
        made_up("<b>odd</b>", 1.0, [0.1], reason="worker 0 failed: <i>"),
    )


def test_levels_are_drawn_for_controllers_alone(record, tmp_path):
    file = tmp_path / "report.html"
    report.write_report([record_of(*(run for run in record.runs if run.plan.controller is None))], file)
    assert "Level over seconds" not in file.read_text()
    report.write_report([record], file)
    page = file.read_text()
    figure = page[page.index("Level over seconds") :]
    assert "by mqgrad over allreduce" in figure and "powergossip" not in figure


def test_the_page_is_self_contained_and_escapes_what_it_shows(record, tmp_path):
    report.write_report([record], tmp_path / "new" / "report.html")
    page = (tmp_path / "new" / "report.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"']?(https?:)?//", page)
    assert "<b>odd</b>" not in page and "<i>" not in page.split("</script>", 1)[1]
    with pytest.raises(ValueError, match="no run"):
        report.write_report([record_of()], tmp_path / "empty.html")


@chromium
def test_the_page_in_a_browser(record, tmp_path):
    file = tmp_path / "report.html"
    report.write_report([record], file)
    browser = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in browser.stderr
    drawn = set(re.findall(r'class="legendtext"[^>]*data-unformatted="([^"]+)"', browser.stdout))
    curves = {row.label for row in table.summarise(record) if row.runs}
    assert curves | {"compute", "encode", "wire"} == drawn
    assert "powergossip over gossip" in curves and "Level over seconds" in browser.stdout
    for row in table.summarise(record):
        if row.scheme != "<b>odd</b>":
            assert row.verdict in browser.stdout
