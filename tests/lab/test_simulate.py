"""simulate: lines that go on straight, errors by Simulation, and the page."""

import json
import re
import subprocess
import sys

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from helpers.needs import chromium
from helpers.world import run_world
from thinwire import cli
from thinwire.lab.cost import simulate
from thinwire.lab.cost.accounting import Accounting
from thinwire.lab.cost.advise import default_schemes
from thinwire.lab.cost.model import FLOATS, BucketTrace, Message, Prediction, Step, Turn
from thinwire.lab.cost.rehearsal import rehearse
from thinwire.lab.cost.simulate import ScalePoint, Study
from thinwire.lab.cost.survey import Matrices
from thinwire.lab.report import simulate_page
from thinwire.schemes import registry


def a_step(encode, nbytes):
    return Step(1.0, (BucketTrace(1.0, (Turn(encode, (Message("AllGathered", nbytes),)), Turn(2 * encode))),))


def a_study():
    def point(scheme, workers, seconds, nbytes, extrapolated, vnmse):
        return ScalePoint(scheme, workers, Prediction(0.1, 0.0, seconds, nbytes, 2), extrapolated, vnmse)

    return Study(
        25_000_000, 0.1, 1e10, 2e-5,
        [
            point("fp16", 8, 0.1, 9e7, False, 1e-7), point("fp16", 4096, 0.3, 1e8, False, None),
            point("topk(density=0.01)", 8, 0.02, 1e7, False, 0.4),
            point("topk(density=0.01)", 4096, 9.0, 5e9, True, None),
        ],
    )  # fmt: skip


def test_an_extended_step_lies_on_the_line_through_two():
    found = simulate.extended(a_step(1.0, 700.0), a_step(3.0, 6300.0), 8, 64, 120)
    (bucket,) = found.buckets
    assert found.bytes_sent == pytest.approx(11_900) and bucket.turns[0].encode_seconds == pytest.approx(5)
    assert found.encode_seconds == pytest.approx(15) and bucket.turns[0].messages[0].kind == "AllGathered"


def test_on_paper_a_ring_has_a_hop_for_every_worker():
    link = simulate.paper_link(101, 8e9, 1e-3)
    latencies = {kind: cost.latency_seconds for kind, cost in link.kinds.items()}
    assert latencies == pytest.approx({FLOATS: 0.2, "AllGathered": 0.1, "AllToAll": 1e-3})
    assert link.bits_per_second == pytest.approx(8e9)


def _far(counts):
    simulate.AFFORDABLE_BYTES = 1000
    found = simulate._rehearsed(5000, "topk(density=0.1)", counts)
    simulate.AFFORDABLE_BYTES = 2**30
    steps = {count: steps[0] for count, (steps, _) in found.items()}
    ((real,), _) = simulate._rehearsed(5000, "topk(density=0.1)", counts[-1:])[counts[-1]]
    return steps, [extrapolated for _, extrapolated in found.values()], real.bytes_sent


def test_where_a_rehearsal_is_not_affordable_seconds_go_on_in_a_straight_line_and_bytes_are_counted():
    ((steps, extrapolated, real),) = run_world(_far, 1, [4, 8, 16])
    assert extrapolated == [False, False, True]
    four, eight, sixteen = (step.encode_seconds for step in steps.values())
    assert sixteen == pytest.approx(max(0.0, eight + 2 * (eight - four)), abs=1e-3)
    assert steps[16].bytes_sent == real


def _accounted(schemes, counts):
    """Of each scheme and number of workers: messages and bytes by the exchange's own code, and by accounting."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Matrices(20_000))

    def train():
        model.zero_grad()
        model(torch.ones(())).backward()

    found = {}
    for scheme in schemes:
        for count in counts:
            (own,) = rehearse(model, train, scheme, workers=count, steps=1)
            (said,) = rehearse(
                model, train, scheme, workers=count, steps=1, exchange=Accounting(count, lambda: None)
            )  # fmt: skip
            found[scheme, count] = (own.messages, said.messages)
    return found


def test_accounting_is_what_the_exchange_sends_for_every_scheme():
    (found,) = run_world(_accounted, 1, default_schemes(), [2, 5, 12])
    assert len(found) == 3 * len(registry())
    for key, (own, said) in found.items():
        assert own == said, key


def _many(scheme, count):
    simulate.AFFORDABLE_SECONDS = 0.0
    found = simulate._rehearsed(1024 * 1024, scheme, [8, 64, count])
    assert found[count][1]  # its seconds are on a line
    return found[count][0][0].bytes_sent, found[8][0][0].bytes_sent


def test_with_thousands_of_workers_a_ring_sends_everything_twice():
    ((many, few),) = run_world(_many, 1, "powersgd(factor_rank=4)", 4096)
    assert many / few == pytest.approx((4095 / 4096) / (7 / 8))


def test_errors_are_those_of_the_schemes():
    gradients = simulate._gradients([4])
    assert len(gradients) == 4 and len(gradients[0]) == 2
    exact, coarse, fine = (simulate.settled_vnmse(spec, gradients) for spec in ("fp32", "qsgd(bits=2)", "qsgd(bits=6)"))
    assert exact < 1e-10 < fine < coarse
    assert set(simulate._errors("fp16", gradients, [2, 4, 8])) == {2, 4}


def test_the_command_from_start_to_end(tmp_path):
    file, page = tmp_path / "study.json", tmp_path / "study.html"
    arguments = "simulate --params 20k --compute 1ms --workers 8 --workers 2 --scheme topk"
    result = CliRunner().invoke(cli.app, f"{arguments} --json {file} --report {page}")
    assert result.exit_code == 0, result.output
    told = json.loads(file.read_text())
    points = {(point["scheme"], point["workers"]): point for point in told["points"]}
    assert set(points) == {(scheme, workers) for scheme in ("fp16", "topk") for workers in (2, 8)}
    # A ring all-reduce of 2 bytes for each of 20,000 weights.
    assert points["fp16", 8]["prediction"]["bytes_sent"] == pytest.approx(2 * 7 / 8 * 40_000, rel=1e-3)
    assert points["fp16", 2]["vnmse"] < 1e-5 < points["topk", 2]["vnmse"] < 1
    assert all(point["prediction"]["compute_seconds"] > 0.00099 for point in points.values())
    assert "topk" in result.output and "topk" in page.read_text()

    result = CliRunner().invoke(cli.app, f"{arguments} --every 4 --json {file}")
    assert result.exit_code == 0 and "an exchange every 4 steps" in " ".join(result.output.split())
    seldom = {(point["scheme"], point["workers"]): point for point in json.loads(file.read_text())["points"]}
    for key, point in points.items():
        assert seldom[key]["prediction"]["bytes_sent"] == pytest.approx(point["prediction"]["bytes_sent"] / 4)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--params big", "number of weights 'big'"),
        ("--bandwidth fast", "cannot read the rate 'fast'"),
        ("--latency soon", "cannot read the time 'soon'"),
        ("--workers 1", "workers must be at least 2, got 1"),
        ("--scheme zip", "unknown scheme 'zip'"),
        ("--every 0", "every must be at least 1 step, got 0"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thinwire", "simulate", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert ended.value.code == 2 and said in told.err and told.err.count("\n") == 1


def test_the_table_marks_what_is_extrapolated_and_bytes_are_not():
    table = simulate_page.study_table(a_study())
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["fp16", "topk(density=0.01)"] and cells[2] == ["400", "~9,100"]
    assert "~" not in "".join(cells[3] + cells[4])
    assert cells[-1] == ["1.0e-07 (8)", "4.0e-01 (8)"]


def test_the_page_is_self_contained(tmp_path):
    simulate_page.write_study(a_study(), tmp_path / "new" / "page.html")
    page = (tmp_path / "new" / "page.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"']?(https?:)?//", page)
    assert "~9,100" in page and "25 M weights" in page


@chromium
def test_the_page_in_a_browser(tmp_path):
    file = tmp_path / "page.html"
    simulate_page.write_study(a_study(), file)
    browser = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in browser.stderr
    drawn = re.findall(r'class="legendtext"[^>]*data-unformatted="([^"]+)"', browser.stdout)
    assert drawn.count("fp16") == drawn.count("topk(density=0.01)") == len(simulate_page.MEASURES)
