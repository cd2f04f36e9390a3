"""The picture of the README: accuracy over seconds on every link of a record of `thinwire compare`.

python docs/_site/picture.py RECORD.json PICTURE.png
"""

import html
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from thinwire.lab.report import figures, report, table
from thinwire.lab.runs.record import Record

PAGE = """<!doctype html><meta charset="utf-8">
<style>
  body {{ margin: 14px; font: 15px system-ui, sans-serif; color: #1f2328; }}
  p {{ margin: 0 0 10px 48px; font-size: 16px; }} p span {{ margin-right: 22px; }}
  div.panels {{ display: grid; grid-template-columns: repeat({panels}, 1fr); gap: 12px; }}
  figure {{ margin: 0; min-width: 0; }} h3 {{ font-size: 16px; margin: 0 0 4px 48px; }}
</style>
<p>{legend}</p><div class="panels">{figures}</div>
<script type="text/plain" id="plotly">{plotly}</script><script>{script}</script>"""


def looks_of(record: Record) -> dict[str, figures.Style]:
    rows = table.summarise(record)
    return figures.styles([row.label for row in rows], [row.label for row in rows if row.baseline])


def legend(looks: dict[str, figures.Style]) -> str:
    return "".join(
        f'<span style="color: {look.colour or "#1f2328"}">{look.sign} {html.escape(label)}</span>'
        for label, look in looks.items()
    )


def panel(record: Record) -> str:
    """One link's curves; the axis is a log one on all, for they stand side by side."""
    curves: dict[str, list] = {}
    for run in record.runs:
        curves.setdefault(table.label(record, run), []).append(run)
    figure = figures.scores(curves, looks_of(record), figures.AXES[0])
    figure.update_xaxes(type="log", range=[math.log10(0.4), math.log10(150)])
    spec = json.loads(figures.spec(figure, 0))
    spec["layout"] |= {"height": 340, "showlegend": False}
    link = {"none": "loopback, not slowed"}.get(record.config["network"], record.config["network"])
    data = json.dumps(spec).replace("<", "\\u003c")
    return f'<figure><h3>{link}</h3><div class="plot"></div><script type="application/json">{data}</script></figure>\n'


def main(source: Path, picture: Path) -> None:
    parts = Record.load(source).by_network()
    panels = [panel(part) for part in parts]
    script = (Path(report.__file__).parent / "templates" / "page.js").read_text()
    page = PAGE.format(
        panels=len(panels), legend=legend(looks_of(parts[0])), figures="".join(panels), plotly=report.packed_plotly(),
        script=script,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.html"
        file.write_text(page, encoding="utf-8")
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--virtual-time-budget=10000", "--window-size=1400,440", f"--screenshot={picture}", file.as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
