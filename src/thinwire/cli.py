"""The command `thinwire`. Commands import what they need when they run: help and mistakes need not wait for PyTorch."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding

from thinwire.lab.defaults import (
    DEFAULT_EXCHANGES,
    DEFAULT_NETWORK,
    DEFAULT_OUTER,
    DEFAULT_TASKS,
    LONGER,
    SIMULATED_WORKERS,
)
from thinwire.lab.repro.papers import PAPERS

app: typer.Typer = typer.Typer(
    help="Train PyTorch models over thin wires, and find out whether compression pays.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON.")]
TASKS: list[str] = [*DEFAULT_TASKS]
EXCHANGES: list[str] = [*DEFAULT_EXCHANGES]
NETWORKS: list[str] = [DEFAULT_NETWORK]
COUNTS: list[int] = [*SIMULATED_WORKERS]
NONE: list[str] = []
STEPS: list[int] = []
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Where the standard data files lie.")]
# What the parser raises: of typer's own copy of click or, in older versions, of click itself.
Misused: Any = typer.BadParameter.__base__


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"thinwire {installed('thinwire')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise typer.Exit


@app.command("compare")
def compare_schemes(
    task: Annotated[list[str], typer.Option(metavar="SPEC", help="mlp, cnn, path.py:function; repeatable.")] = TASKS,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help='See `thinwire list`; over gossip a mixer; "qsgd every 8" in local steps; repeatable. Without: a '
            "choice that fits.",
        ),
    ] = None,
    exchange: Annotated[
        list[str],
        typer.Option(
            metavar="SPEC",
            help='allreduce, hierarchical, "server(servers=2)", "gossip(graph=\'ring\')"; repeatable.',
        ),
    ] = EXCHANGES,
    controller: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="Also let mqgrad, schedule, ... turn the knobs of schemes; repeatable."),
    ] = None,
    every: Annotated[
        list[int], typer.Option(help="Steps between two exchanges: above 1 workers train on their own; repeatable.")
    ] = STEPS,
    outer: Annotated[
        str, typer.Option(metavar="SPEC", help="Then moves the common weights: average, nesterov(lr=0.7), sgd(lr=1).")
    ] = DEFAULT_OUTER,
    longer: Annotated[float, typer.Option(help="Rows of local steps train so many times as many steps.")] = LONGER,
    network: Annotated[
        list[str],
        typer.Option(
            help="none, shaped:100mbit, paced:100mbit,5ms, 100mbit (either); 2=10mbit makes worker 2 slow; repeatable: "
            "trained once, timed on each."
        ),
    ] = NETWORKS,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="First find every row's learning rate by validation examples: 3 to 6 runs a row, or more."
        ),
    ] = False,
    seeds: Annotated[int, typer.Option(help="Runs per scheme; the table shows means, verdicts have intervals.")] = 3,
    workers: Annotated[
        str, typer.Option(help="Processes that train together; 2x4: two machines of four, which share its link.")
    ] = "4",
    parallel: Annotated[
        str, typer.Option(help="ddp, or fsdp: a sharded model, compressed between machines or between shards.")
    ] = "ddp",
    steps: Annotated[int | None, typer.Option(help="Instead of the task's own number of steps.")] = None,
    data: Data = None,
    json_file: Json = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page.")] = None,
) -> None:
    """Does compression pay? Train the same task under several schemes and see which is at the target first.

    Time to accuracy against the fp16 baseline, on a network as slow as you say. For example:

      thinwire compare --scheme fp16 --scheme "qsgd(bits=4)" --network 50mbit --report page.html
    """
    from thinwire.lab.runs.compare import compare

    record = compare(
        task, scheme or (), exchanges=exchange, controllers=controller or (), every=every, outer=outer,
        longer=longer, network=network, tune=tune, parallel=parallel, seeds=seeds, workers=workers, steps=steps,
        data=data, json=json_file, report=report,
    )  # fmt: skip
    if record.interrupted:
        raise typer.Exit(130)


@app.command("report")
def make_report(
    files: Annotated[list[Path], typer.Argument(help="Records that `thinwire compare --json` wrote.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page.")] = Path("report.html"),
) -> None:
    """Make the HTML page of earlier comparisons again."""
    from thinwire.lab.report.report import write_report
    from thinwire.lab.runs.record import Record

    write_report([Record.load(file) for file in files], out)
    Console().print(f"wrote {out}")


@app.command("advise")
def give_advice(
    task: Annotated[str | None, typer.Option(metavar="SPEC", help="A task as in compare, whose model it is.")] = None,
    params: Annotated[str | None, typer.Option(metavar="N", help="A model of so many weights, such as 25M.")] = None,
    compute: Annotated[
        str, typer.Option(metavar="TIME", help="With --params: how long a step computes, such as 80ms.")
    ] = "0ms",
    scheme: Annotated[list[str], typer.Option(metavar="SPEC", help="Repeatable; all there are unless given.")] = NONE,
    network: Annotated[
        list[str], typer.Option(help="As in compare; repeatable. Not under torchrun, where the link is what it is.")
    ] = NONE,
    workers: Annotated[
        str | None,
        typer.Option(help="Processes to start on this machine (4); 2x2: two machines of two; not under torchrun."),
    ] = None,
    data: Data = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also train under every scheme: predicted beside measured seconds.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Which scheme should you use? Predicts seconds and steps for all of them, in a minute and without training.

    It measures how long a step computes, how long every scheme takes to
    encode and decode your model's buckets, and how fast the workers' link is.
    It shows where each scheme's time goes (compute, encode, wire), the error of
    its messages, what that costs in steps (by the noise in the gradients, where
    there are a model and a batch), and below which bandwidth it beats fp16. What
    is merely short is not recommended; "use fp16" is a frequent answer. It also
    shows how often to exchange (local steps). `thinwire compare` measures.

    A model by its size, a task of the lab on the loopback, the link between your own machines:

      thinwire advise --params 25M --compute 80ms --network auto:1gbit

      thinwire advise --task cnn --network none

      torchrun --nnodes 4 ... -m thinwire advise --params 25M

    In your own training script, on every rank: print(thinwire.advise(ddp_model, batch))
    """
    if sys.modules.get("torch") is None and os.environ.get("RANK", "0") == "0":  # of torchrun's
        Console().print("advise: starting; PyTorch takes a moment", highlight=False)
    from thinwire.lab.cost.advise_command import advise_on_networks
    from thinwire.lab.network.network import seconds

    advise_on_networks(
        task=task, params=params, compute_seconds=seconds(compute), schemes=scheme, networks=network, workers=workers,
        data=data, check=check, json_file=json_file,
    )  # fmt: skip


@app.command("simulate")
def simulate_groups(
    params: Annotated[str, typer.Option(metavar="N", help="The model's weights.")] = "25M",
    compute: Annotated[str, typer.Option(metavar="TIME", help="How long a step computes.")] = "100ms",
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Of every worker's link.")] = "10gbit",
    latency: Annotated[str, typer.Option(metavar="TIME", help="Of one hop.")] = "20us",
    workers: Annotated[list[int], typer.Option(help="Repeatable.")] = COUNTS,
    every: Annotated[int, typer.Option(help="Steps between two exchanges; above 1, local steps.")] = 1,
    scheme: Annotated[list[str], typer.Option(metavar="SPEC", help="Repeatable; all there are unless given.")] = NONE,
    json_file: Json = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page.")] = None,
) -> None:
    """What would it cost with 8 to 4,096 workers? Bytes, seconds per step and error of every scheme, on paper.

    One worker's part of each exchange is really run on this machine; the link is what you say. For example:

      thinwire simulate --params 125M --bandwidth 1gbit --scheme "qsgd(bits=4)" --scheme "topk(density=0.01)"
    """
    from thinwire.lab.cost.advise import checked
    from thinwire.lab.cost.advise_command import parameters
    from thinwire.lab.cost.simulate import simulate
    from thinwire.lab.network.network import bits_per_second, seconds
    from thinwire.lab.report import simulate_page

    console = Console()
    arguments = {
        "parameters": parameters(params), "workers": workers, "compute_seconds": seconds(compute),
        "bits_per_second": bits_per_second(bandwidth), "latency_seconds": seconds(latency),
        "every": every,
    }  # fmt: skip
    with console.status("starting") as status:
        study = simulate(checked(scheme), **arguments, on_scheme=status.update)
    console.print(simulate_page.study_table(study), highlight=False)
    _write(json_file, study.as_json())
    if report:
        simulate_page.write_study(study, report)
        console.print(f"wrote {report}")


@app.command("repro", epilog="\n\n".join(f"{name}: {paper.cited}" for name, paper in PAPERS.items()))
def reproduce_claims(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help=f"{', '.join(PAPERS)} or all. Without: which paper each is."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller version, under three minutes.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Runs per setting; the default depends on --quick.")] = None,
    part: Annotated[
        list[str], typer.Option(metavar="NAME", help="This part alone; repeatable. Without NAME they are listed.")
    ] = NONE,
    data: Data = None,
    json_file: Json = None,
) -> None:
    """A paper's claims, as near to its set-up as two cores allow: measured beside expected; holds, level or fails.

    Models, data and lengths are mostly ours; docs/papers says what differs. "source" says whose expectation it is: the
    paper's sentence, what the authors' code gave when we ran it, or ours.
    """
    console = Console()
    if name is None:
        for each, paper in PAPERS.items():
            about = f"{paper.cited}. Parts: {', '.join(paper.parts)}"
            console.print(f"[bold]{each}[/]", Padding(about, (0, 0, 0, 4)), sep="\n", highlight=False)
        return
    from thinwire.lab.repro import repro

    results = {}
    for each, result in repro.run(name, quick=quick, seeds=seeds, data=data, parts=part, console=console):
        results[each] = result
        _write(json_file, results)


@app.command("bench")
def bench_kernels(
    schemes: Annotated[bool, typer.Option("--schemes", help="Whole conversations instead of kernels.")] = False,
    scheme: Annotated[
        list[str], typer.Option(metavar="SPEC", help="With --schemes: these; repeatable. Without: one of each kind.")
    ] = NONE,
    workers: Annotated[int, typer.Option(help="With --schemes: the size of the group that is pretended.")] = 2,
    grow: Annotated[
        bool,
        typer.Option("--grow", help="With --schemes: per element, from 1 to 100 M weights and from 2 to 64 workers."),
    ] = False,
    only: Annotated[str, typer.Option(help="Kernels whose name contains this.")] = "",
    repeats: Annotated[int | None, typer.Option(help="Rounds: 5 of kernels, 15 of conversations.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is one: kernels against a copy there.")] = "cpu",
    json_file: Json = None,
) -> None:
    """The speed of every kernel against memcpy and its PyTorch reference, or of whole conversations.

    --schemes: what one worker computes in a step (exemptions, feedback, encode,
    decode; no wire) for an MLP of 5.8 M weights, in its DDP buckets: in
    milliseconds, and in memcpys, the time that one copy of the gradient takes in
    the same rounds. 3 memcpys of a gradient of 100 MB are 6 where it has 200 MB,
    on any machine about alike: what a scheme costs you is that times your own
    copy. A second table says what the memcpys are spent on; "feed" is error
    memory, "py" is Python. Fresh memory is what a step allocates in tensors of 4 KB
    or more, which costs more than computing in it; scratch is kept from step to
    step. For example:

      thinwire bench --schemes --scheme "qsgd(bits=4)" --scheme "thc(bits=4)"

      thinwire bench --only top-k
    """
    if (scheme or workers != 2 or grow) and not schemes:
        raise ValueError("--scheme, --workers and --grow need --schemes")
    if grow and workers != 2:
        raise ValueError("--grow has numbers of workers of its own: leave --workers out")
    if schemes and only:
        raise ValueError("--only chooses kernels; with --schemes use --scheme")
    if device != "cpu":
        if schemes:
            raise ValueError("--device is for kernels: conversations are held in CPU memory")
        from thinwire.lab.bench.device import bench_device

        bench_device(device, repeats=repeats or 20, only=only, json_file=json_file)
    elif grow:
        from thinwire.lab.bench.growth import bench_growth

        bench_growth(scheme, repeats=repeats or 5, json_file=json_file)
    elif schemes:
        from thinwire.lab.bench.schemes import bench_schemes

        bench_schemes(scheme, repeats=repeats or 15, workers=workers, json_file=json_file)
    else:
        from thinwire.lab.bench.bench import bench

        bench(repeats=repeats or 5, only=only, json_file=json_file)


@app.command("list")
def list_schemes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help='One scheme, mixer or controller: qsgd, "qsgd(bits=2)".'),
    ] = None,
    json_file: Json = None,
) -> None:
    """The schemes by family: what each sends and is for; with NAME, its options and their directions."""
    from thinwire.lab import listing

    if name is None:
        rows: Any = [listing.describe(each) for each in listing.everything()]
        listing.show_all(rows, Console())
    else:
        rows = listing.one(name)
        listing.show_one(rows, Console())
    _write(json_file, rows)


@app.command("doctor")
def examine_machine(json_file: Json = None) -> None:
    """Versions, which kernels loaded and why not, and what this machine can do."""
    from rich.markup import escape
    from rich.table import Table

    from thinwire.lab.doctor import examine

    rows = examine()
    table = Table("what", "found", "what follows")
    for row in rows:
        colour = "green" if row.fine else "yellow"
        table.add_row(row.what, f"[{colour}]{escape(row.found)}[/]", escape(row.follows))
    Console().print(table)
    _write(json_file, [vars(row) for row in rows])


def _write(file: Path | None, result: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    """Run the command; a mistake of the user's is one line and exit code 2. SIGTERM is taken like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except Misused as mistake:
        print(f"thinwire: {mistake.format_message()}", file=sys.stderr)
    except (ValueError, OSError) as mistake:
        print(f"thinwire: {mistake}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
