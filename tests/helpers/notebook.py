"""Runs a notebook without Jupyter: code cells in order, in one namespace; and stores what they show.

PYTHONPATH=tests python -m helpers.notebook examples/quickstart.ipynb
"""

import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(file):
    """The notebook with the outputs of this run. It runs in the folder that it lies in, as in Jupyter."""
    notebook = json.loads(file.read_text())
    namespace = {"__name__": "__main__"}
    matplotlib.use("Agg")
    here = Path.cwd()
    os.chdir(file.parent)
    try:
        for number, cell in enumerate(code_cells(notebook), 1):
            cell["execution_count"], cell["outputs"] = number, _outputs("".join(cell["source"]), number, namespace)
    finally:
        os.chdir(here)
    return notebook


def _outputs(source, number, namespace):
    shown = []
    show, plt.show = plt.show, lambda: shown.append(_picture())
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(source, f"cell {number}", "exec"), namespace)
    finally:
        plt.show = show
        plt.close("all")
    lines = said.getvalue().splitlines(keepends=True)
    return ([{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []) + shown


def _picture():
    file = io.BytesIO()
    plt.savefig(file, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
    plt.close("all")
    data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"output_type": "display_data", "data": data, "metadata": {}}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in sys.argv[1:]:
        Path(name).write_text(json.dumps(run(Path(name).resolve()), indent=1, ensure_ascii=False) + "\n")
