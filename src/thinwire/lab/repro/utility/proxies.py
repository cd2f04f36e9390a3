"""The proxy: the error of one step's mean, on gradients of the task, early and late in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

import torch

from thinwire.exchange.simulation import Simulation
from thinwire.lab.repro.claims import Progress
from thinwire.lab.tasks import estimates
from thinwire.lab.tasks.estimates import Named
from thinwire.lab.tasks.tasks import Task

WARM, ROUNDS = 4, 3  # steps that errors are measured on, after those in which schemes with a memory settle
EVERY = 25  # steps between early and late, of which one is told


def vnmses(
    task: Task, specs: Sequence[str], late: int, workers: int, progress: Progress
) -> dict[str, tuple[float, float]]:
    """|X - Xhat|^2 / |X|^2 of every scheme, without error feedback: in the first steps, and after `late`."""
    simulations = {spec: Simulation(spec, workers=workers, feedback=False) for spec in specs}
    found: dict[str, tuple[list[float], list[float]]] = {spec: ([], []) for spec in specs}
    window = WARM + ROUNDS
    for step, grads in enumerate(task_gradients(task, late + window, workers)):
        within = step if step < window else step - late
        if within >= 0 or step % EVERY == 0:
            progress(f"vNMSE on gradients of the task, step {step + 1} of {late + window}")
        if within < 0:
            continue
        exact = estimates.mean_of(grads)
        for spec, simulation in simulations.items():
            error = estimates.vnmse(simulation.reduce(grads), exact)
            if within >= WARM:
                found[spec][step >= late].append(error)
    return {spec: (mean(early), mean(after)) for spec, (early, after) in found.items()}


def task_gradients(task: Task, steps: int, workers: int) -> Iterator[list[Named]]:
    """The workers' gradients, step by step of uncompressed training, of the tensors that get compressed."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    train, _ = task.dataset.split
    shards = [train.shard(worker, workers, seed=0) for worker in range(workers)]
    batches = [shard.batches(task.batch, seed=worker) for worker, shard in enumerate(shards)]
    parameters = dict(model.named_parameters())
    for _ in range(steps):
        grads = []
        for batch in batches:
            examples = next(batch)
            loss = task.loss(model(examples.inputs), examples.targets)
            grads.append(dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))
        mean_gradient = estimates.mean_of(grads)
        yield [{name: g for name, g in grad.items() if estimates.compressed(g)} for grad in grads]
        for name, parameter in parameters.items():
            parameter.grad = mean_gradient[name]
        optimizer.step()
