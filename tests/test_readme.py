"""What the README and the examples show runs, and the pages call things as they are called."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire as tw

ROOT = Path(__file__).parent.parent
# But the changelog, which has old names.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*.py")),
]


def test_what_the_readme_shows_whole_runs_by_itself():
    """A block that imports thinwire needs nothing else; the others are run by tests/test_pages.py."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    blocks = [block for block in blocks if "import thinwire as tw" in block]
    assert blocks
    for block in blocks:
        run = subprocess.run([sys.executable, "-W", "error", "-c", block], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr


def snippets(page):
    """The Python on a page: all of a script; blocks, added lines of a diff, and what begins with tw. in a sentence."""
    text = page.read_text()
    if page.suffix == ".py":
        return [text]
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return blocks + re.findall(r"^\+ (.*)$", text, re.MULTILINE) + re.findall(r"`(tw\.[^`\n]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_call_things_by_their_names(page):
    """Every `tw.name` is there, and takes the options that it is given."""
    for snippet in snippets(page):
        for node in ast.walk(ast.parse(snippet)):
            called = node.func if isinstance(node, ast.Call) else node
            name = ast.unparse(called)
            if not isinstance(called, ast.Attribute) or not re.fullmatch(r"tw(\.\w+)+", name):
                continue
            thing = tw
            for part in name.split(".")[1:]:
                assert hasattr(thing, part), f"{name} is not there"
                thing = getattr(thing, part)
            if isinstance(node, ast.Call):
                options = {keyword.arg for keyword in node.keywords if keyword.arg}  # but **options
                assert options <= set(inspect.signature(thing).parameters), f"{name}() has not all of {options}"


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=170, cwd=ROOT)


def torchrun(*arguments):
    return python("-m", "torch.distributed.run", "--standalone", *arguments)


def test_the_script_of_the_quick_start_trains(tmp_path):
    page = (ROOT / "docs/guide/quick-start.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    run = torchrun("--nproc-per-node", "2", str(script))
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert float(re.search(r"gave ([\d.]+)% of the bytes", run.stdout)[1]) < 20


@pytest.mark.parametrize("example", ["ddp", "local_steps"])
def test_the_example_trains_and_resumes(example, tmp_path):
    script = ("--nproc-per-node", "2", f"examples/{example}.py", "--steps", "20", "--checkpoint", str(tmp_path))
    first, second = torchrun(*script), torchrun(*script)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    losses = [float(re.search(r"loss ([\d.]+)", run.stdout)[1]) for run in (first, second)]
    assert losses[1] < losses[0]
    assert "step   40" in second.stdout
    assert float(re.search(r"gave ([\d.]+)% of the bytes", second.stdout)[1]) < 20


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (["examples/two_level.py", "--per-machine", "2"], r"[\d,]+ bytes inside machines, [\d,]+ between"),
        (["examples/fsdp.py"], r"given 1\d% of the bytes"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_the_examples_for_four_ranks_train(script, says):
    run = torchrun("--nproc-per-node", "4", *script, "--steps", "40")
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert losses[-1] < losses[0]
    assert re.search(says, run.stdout)


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_the_examples_with_frameworks_train(framework, tmp_path):
    folder = tmp_path / "run"
    script = (f"examples/with_{framework}.py", "--checkpoint", str(folder))
    if framework == "lightning":  # which starts its processes by itself
        run = python(*script, "--epochs", "2")
    else:
        run = torchrun("--nproc-per-node", "2", *script, "--steps", "40")
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"\bloss\W+([\d.]+)", run.stdout)]
    assert len(losses) > 1 and losses[-1] < losses[0]
    assert float(re.search(r"gave ([\d.]+)% of the bytes", run.stdout)[1]) < 20
    assert list(folder.iterdir())


@pytest.mark.parametrize(
    "arguments", [["list"], ["doctor"], ["--help"], ["list", "--help"]], ids=" ".join
)  # fmt: skip
def test_the_command_answers(arguments, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "thinwire.cli", *arguments], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) > 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["frobnicate"], "No such command 'frobnicate'"), (["list", "--json", "/nowhere/x.json"], "No such file")],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, says):
    run = subprocess.run(
        [sys.executable, "-m", "thinwire.cli", *arguments], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 2
    assert says in run.stderr and "Traceback" not in run.stderr


LINKED = [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), f"{page.name}: {target}"
        assert not anchor or anchor in _anchors(file.read_text()), f"{page.name}: {target}#{anchor}"


def _anchors(text):
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
