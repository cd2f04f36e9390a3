"""One rank of a fault test: trains, and dies by its own SIGKILL where it is told to; says what it saw."""

import json
import os
import signal
import sys
import warnings

import networkx as nx
import torch
import torch.distributed as dist
from torch import nn

from thinwire.gossip import Gossip, graphs


def chorded_ring(nodes: int) -> graphs.Graph:
    graph = nx.cycle_graph(nodes)
    graph.add_edges_from([(0, 2), (1, 3)])
    return graphs.of(graph, name=f"chorded ring {nodes}")


def learner() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def flat(model: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def error_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x[:, :3].sum(1, keepdim=True).sin())


def main(graph_name: str, mixer: str, victims: list[int], death: int, steps: int, on_failure: str) -> dict:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    graph = chorded_ring(ranks) if graph_name == "chorded" else getattr(graphs, graph_name)(ranks)
    model, optimizer = learner()
    gossip = Gossip(model, graph, mixer, on_failure=on_failure, timeout_seconds=60)
    generator = torch.Generator().manual_seed(rank)
    unseen = torch.randn(256, 10, generator=torch.Generator().manual_seed(99))
    losses, error = [], None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            for step in range(steps):
                x = torch.randn(64, 10, generator=generator)
                optimizer.zero_grad()
                error_of(model, x).backward()
                if step == death and rank in victims:
                    os.kill(os.getpid(), signal.SIGKILL)
                gossip.mix()
                optimizer.step()
                losses.append(float(error_of(model, unseen)))
            distance = gossip.consensus()
            with gossip.average():
                checksum = float(sum(p.double().sum() for p in model.parameters()))
        except RuntimeError as caught:
            error, distance, checksum = f"{type(caught).__name__}: {caught}", None, None
    seen = {"losses": losses, "lost": gossip.dead, "distance": distance, "checksum": checksum, "error": error}
    gossip.close()
    return seen | {"weights": flat(model), "warnings": [str(w.message) for w in heard]}


def script() -> None:
    """The same as a process of its own: arguments from the command line, what it saw on standard output."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    print(json.dumps(main(**json.loads(sys.argv[1]))), flush=True)
