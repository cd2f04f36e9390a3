"""Every block of Python on every page is run, or says which test runs it; every command is one that is there."""

import ast
import calendar
import re
import shlex
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"(?:^<!-- run by (?P<where>\S+) -->\n)?^```(?P<kind>python|diff)\n(?P<text>.*?)^```", re.M | re.S)


class Stage(dict):
    """What a reader of a page has already, made when a block first asks for it."""

    def __missing__(self, name):
        if name not in MAKE:
            raise KeyError(name)
        self[name] = MAKE[name](self)
        return self[name]


MAKE = {
    "net": lambda stage: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "model": lambda stage: DistributedDataParallel(stage["net"]),
    "optimizer": lambda stage: torch.optim.SGD(stage["net"].parameters(), lr=0.1),
    "wire": lambda stage: tw.attach(stage["model"], "topk(density=0.1)"),
    "batches": lambda stage: [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(2)],
    "loss": lambda stage: nn.functional.cross_entropy,
    "rank": lambda stage: 0,
}


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A process group of this process alone, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    torch.manual_seed(0)
    yield tmp_path
    dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_run(page, alone):
    """One after the other; those that need more than one process name the test that runs them."""
    stage = Stage(torch=torch, dist=dist, tw=tw, nn=nn, DistributedDataParallel=DistributedDataParallel, folder=alone)
    for block in BLOCK.finditer(page.read_text()):
        code = block["text"]
        if block["kind"] == "diff":
            code = "".join(line[2:] + "\n" for line in code.splitlines() if not line.startswith("-"))
        if block["where"]:
            run_elsewhere(page, code, *block["where"].partition("::")[::2])
            continue
        with warnings.catch_warnings():
            # A group of one is what torch.distributed.checkpoint warns of.
            warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
            exec(compile(code, page.name, "exec"), stage)
        for made in ("wire", "local", "gossip"):
            if made in stage:
                stage.pop(made).close()


DOORS = (tw, tw.Wire, tw.Role, tw.Gossip, tw.LocalSteps, tw.ServerOptimizer)
OURS = {name for door in DOORS for name in dir(door) if not name.startswith("_")} | {"Thinwire"}


def run_elsewhere(page, code, where, named):
    """The test has the block from the page, or itself or an example calls all of ours that the block does, by the same
    keywords.
    """
    test = (ROOT / where).read_text()
    assert named in test, f"{where} does not run {named}"
    if page.name in (named or test):
        return
    run = {call for text in (test, *(file.read_text() for file in ROOT.glob("examples/*.py"))) for call in calls(text)}
    assert calls(code) <= run, f"{page.name}: neither {where} nor an example calls {calls(code) - run}"


def calls(code):
    """Of thinwire's names: (name, keyword), and (name, None) for the call itself. **options may be any dict's."""
    nodes = list(ast.walk(ast.parse(code)))
    spread = {ast.literal_eval(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys if _text(key)}
    found = set()
    for node in nodes:
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if name in OURS:
            words = {None, *(keyword.arg for keyword in node.keywords)}
            found |= {(name, word) for word in words | (spread if None in [k.arg for k in node.keywords] else set())}
    return found


def _text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_a_call_that_nobody_makes_is_noticed():
    with pytest.raises(AssertionError, match="colour"):
        run_elsewhere(ROOT / "README.md", 'tw.attach(model, "fp16", colour=2)', "tests/test_readme.py", "with_")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_words_are_those_of_the_field(page):
    """Names in code may be older; what is said is not."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    old = re.findall(r"(?i)error memory|foretell|foretold|\bjudg\w*|\bstretch\w*|\bentries\b", text)
    assert not old, "error feedback, predict, evaluate, segment, elements"


TABLE = re.compile(r"(?:^\|.*\n)+", re.M)
SOURCE = re.compile(
    r"(?:^    |`)(?:\w+=\S+ )*(?:thinwire (?:compare|repro|bench|advise|simulate)|make |torchrun |python benchmarks/)"
    r"|`(?:tests|examples)/\S+\.py",
    re.M,
)
WITHOUT_COMMAND = {"measured/benchmarks.md: fp16", "papers/mqgrad.md: What was tried"}  # and they say so


def tables_of_figures():
    """(page, heading, section) of every table with two figures or more in two rows or more."""
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        for section in re.split(r"^(?=#+ )", page.read_text(), flags=re.M):
            rows = [row.split("|")[2:] for table in TABLE.findall(section) for row in table.splitlines()[2:]]
            figures = [sum(bool(re.match(r"[ *]*[-+.]?\d", cell)) for cell in row) for row in rows]
            if sum(count >= 2 for count in figures) >= 2:
                yield page, section.splitlines()[0].strip("# "), section


TABLES = [pytest.param(*each, id=f"{each[0].name}: {each[1]}") for each in tables_of_figures()]


@pytest.mark.parametrize(("page", "heading", "section"), TABLES)
def test_no_table_of_figures_without_its_command_machine_and_date(page, heading, section):
    """The command in its section; the machine and the code's date once for a page, or for all papers."""
    place = str(page.relative_to(ROOT / "docs")) if page.parent != ROOT else page.name
    assert SOURCE.search(section) or f"{place}: {heading}" in WITHOUT_COMMAND
    said = page.read_text() + ((page.parent / "index.md").read_text() if page.parent.name == "papers" else "")
    assert re.search(r"\bcores\b|any machine|whatever machine", said), "on what machine?"
    assert re.search(rf"\b(?:{'|'.join(calendar.month_name[1:])}) 20\d\d\b", said), "of what date?"


def commands():
    """Indented lines and inline code that call for one of our programs."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S).replace("\\\n", "")
        lines = re.findall(r"^    (.+)$", text, re.M) + re.findall(r"`([^`\n]+)`", text)
        for line in dict.fromkeys(line.partition("  #")[0].strip() for line in lines):
            if re.match(r"(\w+=\S+ )*(\.venv/bin/)?(thinwire|make|torchrun|python) ", line):
                yield pytest.param(line, id=f"{page.name}: {line}")


@pytest.mark.parametrize("line", list(commands()))
def test_the_command_is_there(line):
    words = shlex.split(line.partition(" && ")[0].replace("[", "").replace("]", ""), comments=True)
    while "=" in words[0]:
        words = words[1:]
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([\w-]+|\$\(VENV\)/[\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        asked = {word.replace(".venv", "$(VENV)") for word in rest if "=" not in word}
        assert asked <= set(targets)
    elif program == "thinwire":
        _parses(rest)
    else:
        _takes_the_options(rest)


def _parses(words):
    """Options and arguments are known; their values are not looked at."""
    group = typer.main.get_command(app)
    if words[0].startswith("-"):
        return
    assert words[0] in group.commands, f"no such command: {words[0]}"
    command = group.commands[words[0]]
    command.make_parser(typer.Context(command)).parse_args(words[1:])


def _takes_the_options(words):
    """A script of this repository starts, and has the options that it is given."""
    scripts = [word for word in words if word.endswith(".py")]
    if not scripts or scripts[0] == "train.py" or "pytest" in words:
        return
    known = _help(scripts[0])
    for word in words[words.index(scripts[0]) + 1 :]:
        assert not word.startswith("--") or word in known, f"{scripts[0]} has no {word}"


@cache
def _help(script):
    run = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return re.findall(r"--[\w-]+", run.stdout)
