"""The documentation site builds without a warning, asks nobody else for anything, and has every public name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire as tw

ROOT = Path(__file__).parent.parent
# What is not documented as thinwire.NAME: a page, and a heading on it.
ELSEWHERE = {
    "advise": ("lab", "thinwire.lab.cost.advise.advise"),
    "checkpoint": ("checkpoint", "thinwire.checkpoint.merge"),
    "control": ("control", "thinwire.control.mqgrad.MQGrad"),
    "graphs": ("gossip", "thinwire.gossip.graphs.ring"),
    "local": ("local", "thinwire.local.recipes.diloco"),
    "theory": ("theory", "thinwire.core.theory.laplace_threshold"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages, built strictly: links, anchors and pages that no menu has are warnings, and warnings are errors."""
    folder = tmp_path_factory.mktemp("site")
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        capture_output=True, text=True, timeout=170, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert run.returncode == 0 and not run.stderr, run.stderr
    return folder


def test_it_asks_nobody_else_for_anything(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(https?://[^\"> ]+)", page.read_text())
        assert not loaded, page.name
    styles = "".join(sheet.read_text() for sheet in site.rglob("*.css"))
    assert not re.search(r"(?:@import|url\()\s*[\"']?https?:", styles)


def test_every_public_name_is_in_the_reference(site):
    pages = {page.stem: page.read_text() for page in (site / "reference").glob("*.html")}
    for name in tw.__all__:
        page, heading = ELSEWHERE.get(name, (None, f"thinwire.{name}"))
        where = [pages[page]] if page else pages.values()
        assert any(f'id="{heading}"' in text for text in where), name


def test_docstrings_come_out_as_they_are_meant(site):
    """Examples are code, options a list, and what is said beside a scheme's fields is there."""
    attach, schemes = ((site / f"reference/{name}.html").read_text() for name in ("attach", "schemes"))
    assert "<li><code>exempt</code>: which parameters travel exact" in attach
    assert "&gt;&gt;&gt; </span>" in attach and "<blockquote>" not in attach
    assert "<li><code>bits=4</code>: lower =&gt; fewer bytes, more error</li>" in schemes
    assert "summary=" not in schemes
