"""The page: every scheme's curve and verdict, nothing fetched, no error in a browser."""

import re
import subprocess

import pytest

from helpers.needs import chromium
from helpers.runs import FP16, made_up, record_of
from thinwire.lab.report import figures, report, table
from thinwire.lab.report.headline import headline


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
    assert (tmp_path / "new" / "report.html").stat().st_size < 5_000_000
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"']?(https?:)?//", page)
    assert "<b>odd</b>" not in page and "<i>" not in page
    with pytest.raises(ValueError, match="no run"):
        report.write_report([record_of()], tmp_path / "empty.html")


def rows_of(*runs):
    return table.summarise(record_of(*runs))


def many(scheme, seconds, ends, **options):
    """Three seeds, whose scores come to these ends."""
    return [made_up(scheme, seconds, [0.5, 0.8, 0.8, end], seed=seed, **options) for seed, end in enumerate(ends)]


EQUAL = (0.850, 0.851, 0.849)


def test_the_headline_names_what_surely_pays_before_what_is_faster_and_may_not():
    fp16 = many("fp16", 2.0, EQUAL)
    level, unsure = many("qsgd(bits=4)", 1.0, EQUAL), many("signsgd", 0.25, (0.85, 0.80, 0.90))
    assert headline(rows_of(*fp16, *level)) == "qsgd(bits=4) pays: 2.0x sooner than fp16."
    assert headline(rows_of(*fp16, *level, *unsure)) == (
        "qsgd(bits=4) pays: 2.0x sooner than fp16; signsgd is 8.0x sooner, but whether it ends as good is open."
    )
    assert headline(rows_of(*fp16, *unsure)).startswith("signsgd may pay: it is 8.0x sooner than fp16;")


def test_the_headline_says_so_where_nothing_pays():
    fp16 = many("fp16", 2.0, EQUAL)
    worse = many("topk", 1.0, (0.820, 0.821, 0.819))
    assert headline(rows_of(*fp16, *many("qsgd(bits=4)", 2.0, EQUAL))) == "Nothing pays here: stay with fp16."
    assert "topk is 2.0x sooner than fp16, and ends worse" in headline(rows_of(*fp16, *worse))
    assert headline(rows_of(*worse)).startswith("No verdict")


def test_what_holds_the_target_goes_before_what_does_not():
    fp16 = many("fp16", 2.0, EQUAL)
    short = [made_up("topk", 0.5, [0.5, 0.6, 0.7, end], seed=seed) for seed, end in enumerate(EQUAL)]
    assert headline(rows_of(*fp16, *short)) == "topk pays: 4.0x sooner through all steps than fp16."
    both = rows_of(*fp16, *short, *many("qsgd(bits=4)", 1.0, EQUAL))
    assert headline(both) == "qsgd(bits=4) pays: 2.0x sooner than fp16."


def test_the_first_figure_has_bands_over_seeds_and_a_log_axis_where_seconds_differ_much():
    def first(*runs):
        curves = {}
        for run in runs:
            curves.setdefault(run.plan.scheme, []).append(run)
        return figures.scores(curves, figures.styles(list(curves), ["fp16"]), figures.AXES[0])

    fp16 = many("fp16", 2.0, EQUAL)
    near, far = first(*fp16, made_up("fp32", 3.0, [0.5, 0.8])), first(*fp16, made_up("fp32", 0.02, [0.5, 0.8]))
    assert near.layout.xaxis.type is None and far.layout.xaxis.type == "log"
    bands = [trace for trace in near.data if trace.fill == "toself"]
    assert [band.legendgroup for band in bands] == ["fp16"]  # one seed has none
    assert max(bands[0].y) == 0.851 and "0.849" not in str(near.data[0].name)
    assert "3 seeds" in near.data[1].text[0]


def test_styles_differ_without_colour():
    made = figures.styles([f"row {number}" for number in range(30)], ["row 0"])
    looks = [(style.colour, style.dash, style.marker) for style in made.values()]
    assert len(set(looks)) == len(looks)
    few = list(made.values())[:5]
    assert len({style.marker for style in few}) == 5


def browse(file, tmp_path):
    return subprocess.run(
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


@chromium
def test_a_column_sorts_by_a_button(record, tmp_path):
    file = tmp_path / "report.html"
    report.write_report([record], file)
    press = "for (const b of document.querySelectorAll('th button')) if (b.textContent == 'steps/s') b.click()"
    file.write_text(file.read_text().replace("</body>", f"<script>{press}</script></body>"))
    page = browse(file, tmp_path).stdout
    assert page.count('<th scope="col" aria-sort="ascending">') == 1
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    speeds = re.findall(r"<tr.*?</tr>", body, re.DOTALL)
    found = [float(re.findall(r'data-value="([^"]*)"', row)[4]) for row in speeds if "colspan" not in row]
    assert found == sorted(found) and len(set(found)) > 1
    assert "colspan" in speeds[-1]  # what failed has no speed, and goes last


@chromium
def test_the_page_in_a_browser(record, tmp_path):
    file = tmp_path / "report.html"
    report.write_report([record], file)
    browser = browse(file, tmp_path)
    assert "CONSOLE" not in browser.stderr
    drawn = set(re.findall(r'class="legendtext"[^>]*data-unformatted="([^"]+)"', browser.stdout))
    curves = {row.label for row in table.summarise(record) if row.runs}
    assert curves | {"compute", "encode", "wire"} == drawn
    assert "powergossip over gossip" in curves and "Level over seconds" in browser.stdout
    for row in table.summarise(record):
        if row.scheme != "<b>odd</b>":
            assert row.verdict in browser.stdout
