"""The command `thinwire advise`: the group it runs on, and the check of its predictions against real steps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.exchange.allreduce import AllReduce
from thinwire.lab.cost import survey
from thinwire.lab.cost.advise import Advice, Given, checked
from thinwire.lab.cost.survey import Survey
from thinwire.lab.defaults import DEFAULT_NETWORK
from thinwire.lab.network import links
from thinwire.lab.network.network import Network
from thinwire.lab.runs import launch
from thinwire.lab.runs.compare import parse_workers
from thinwire.lab.runs.launch import Place
from thinwire.lab.tasks.tasks import load_task

DEFAULT_TASK = "mlp(width=1024)"
CHECK_NETWORKS = ("none", "auto:1gbit", "auto:100mbit")
CHECK_SCHEMES = (
    "fp32", "fp16", "qsgd(bits=4)", "tnq(bits=4)", "thc(bits=4)", "topk(density=0.01)", "topkc(density=0.1)",
    "powersgd(factor_rank=4)",
)  # fmt: skip
CHECK_STEPS = 12  # trained for real under every scheme
WITHIN = 0.2
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def advise_on_networks(
    *,
    task: str | None = None,
    params: str | None = None,
    compute_seconds: float = 0.0,
    schemes: Sequence[str] = (),
    networks: Sequence[str] = (),
    workers: int | str | None = None,
    data: Path | None = None,
    check: bool = False,
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[Advice]:
    """Print advice for each network; under torchrun, for the group that it is. Mistakes raise ValueError first."""
    console = console or Console()
    model, look = _model(task, params, compute_seconds, schemes or (CHECK_SCHEMES if check else ()), data, check)
    if dist.is_torchelastic_launched():
        if networks or workers is not None:
            raise ValueError("under torchrun the group is there already: --network and --workers have no place")
        found = _under_torchrun(model, look, console)
    else:
        count, local = parse_workers(4 if workers is None else workers)
        if count < 2:
            raise ValueError(f"workers must be at least 2, got {count}")
        texts = networks or (CHECK_NETWORKS if check else (DEFAULT_NETWORK,))
        nets = [links.resolved(text, count, local) for text in texts]
        found = []
        for net in nets:
            given = Given(net.rate.up if net.rate else None, compute_seconds or None)
            with _Progress(console, f"{model} on {net}: {count} workers, {look.count} schemes, about a minute") as tell:
                found.append(Advice(_on_this_machine(look, count, local, net, tell), model, str(net), given))
    for advice in [] if check else found:
        console.print(advice, highlight=False)
    if check and found:
        console.print(check_table(found), highlight=False)
        console.print(check_sentence(found), highlight=False)
    if json_file and found:
        json_file.write_text(json.dumps([advice.as_json() for advice in found], indent=1) + "\n")
    return found


class _Look:
    """What every worker does: pickled to other processes, so a class and not a closure."""

    def __init__(self, how: Callable[..., Survey], arguments: tuple[Any, ...]):
        self.how = how
        self.arguments = arguments

    def __call__(self, exchange: Callable[[], AllReduce], local: int, tell: Callable[[str], object]) -> Survey:
        return self.how(exchange, *self.arguments, local=local, tell=tell)

    @property
    def count(self) -> int:
        """How many schemes are looked at."""
        return len(self.arguments[2])


class _Progress:
    """Says at once what is going on, and then what is measured: in place on a terminal, elsewhere a line each."""

    def __init__(self, console: Console, first: str):
        self._console, self._first = console, first
        self._status = console.status(first)

    def __enter__(self) -> Callable[[str], None]:
        self._console.print(self._first, highlight=False)
        if self._console.is_terminal:
            self._status.start()
        return self._tell

    def _tell(self, text: str) -> None:
        if self._console.is_terminal:
            self._status.update(f"measuring {text}")
        else:
            self._console.print(f"measuring {text}", highlight=False)

    def __exit__(self, *_: object) -> None:
        self._status.stop()


def _model(
    task: str | None, params: str | None, compute_seconds: float, schemes: Sequence[str], data: Path | None, check: bool
) -> tuple[str, _Look]:
    """The model in words, and how to survey it."""
    chosen = checked(schemes)
    if params is None:
        if compute_seconds:
            raise ValueError("a task's computation is measured: --compute belongs to --params")
        spec = task or DEFAULT_TASK
        load_task(spec, data)
        return spec, _Look(survey.of_task, (spec, data, chosen, CHECK_STEPS if check else 0))
    if task is not None:
        raise ValueError(f"name one model: --task {task} or --params {params}")
    if check:
        raise ValueError("--check trains: it needs a task, not --params")
    if compute_seconds < 0:
        raise ValueError(f"the seconds of computation must not be negative, got {compute_seconds}")
    words = f"{params} weights, {compute_seconds * 1e3:g} ms of computation"
    return words, _Look(survey.of_size, (parameters(params), compute_seconds, chosen))


def parameters(text: str) -> int:
    """The number that text such as "25M" says."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower())
    number = round(float(found[1]) * _SIZES[found[2]]) if found else 0
    if not found or number < 1:
        raise ValueError(f"cannot read the number of weights {text!r}; it looks like 25M (k, M, B)")
    return number


def _on_this_machine(
    look: _Look, workers: int, local: int, network: Network, tell: Callable[[str], object]
) -> Survey:  # fmt: skip
    """By processes of our own, over links of the lab."""
    with links.opened(network, workers, local=local) as opened:
        names = opened and opened.by_rank()
        return launch.on_ranks(_worker, workers, look, local, network, namespaces=names, on_message=tell)[0]


def _worker(place: Place, look: _Look, local: int, network: Network) -> Survey:
    def exchange() -> AllReduce:
        return AllReduce(transport=links.transport(network, place.rank, place.ranks))

    with place.joined():
        found = look(exchange, local, place.send if place.rank == 0 else lambda text: None)
        dist.barrier()
        return found


def _under_torchrun(model: str, look: _Look, console: Console) -> list[Advice]:
    """The advice on rank 0, nothing on the others."""
    dist.init_process_group("gloo")
    try:
        ranks, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        levels = local if local < ranks and ranks % local == 0 else 1
        if dist.get_rank() != 0:
            look(AllReduce, levels, lambda text: None)
            return []
        with _Progress(console, f"{model} on the group's own link: {ranks} workers, {look.count} schemes") as tell:
            return [Advice(look(AllReduce, levels, tell), model, "the group's own link")]
    finally:
        dist.destroy_process_group()


def errors(advice: Advice) -> dict[str, float]:
    """(predicted - measured) / measured of every scheme that was trained for real."""
    return {
        row.scheme: row.prediction.seconds / advice.survey.performed[row.scheme] - 1
        for row in advice.rows
        if row.scheme in advice.survey.performed
    }


def check_table(found: Sequence[Advice]) -> Table:
    """Predicted beside measured, a column per network."""
    table = Table(
        title=f"{found[0].model}, {found[0].survey.workers} workers: ms a step, predicted / measured",
        title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
    )  # fmt: skip
    table.add_column("scheme")
    for advice in found:
        table.add_column(advice.network, justify="right", no_wrap=True)
    for scheme in found[0].survey.performed:
        cells = []
        for advice in found:
            predicted, measured = advice.survey.predict(scheme).seconds, advice.survey.performed[scheme]
            error = predicted / measured - 1
            colour = "green" if abs(error) <= WITHIN else "red"
            cells.append(f"{predicted * 1e3:.0f} / {measured * 1e3:.0f} [{colour}]{error:+4.0%}[/]")
        table.add_row(scheme, *cells)
    return table


def check_sentence(found: Sequence[Advice]) -> str:
    every = [error for advice in found for error in errors(advice).values()]
    good = sum(abs(error) <= WITHIN for error in every)
    return f"{good} of {len(every)} predictions ({good / len(every):.0%}) are within {WITHIN:.0%} of the measured step."
