"""thinwire repro mqgrad: does a learner that sets the level reach the target no later than the best fixed one?

Real runs: a parameter server, two workers, links on which the wire rules and on which computing does (shaped where the
machine allows it, else paced), seconds of the wall clock. MQGrad's own reward, learner and results are not public: this
checks the claims on our design. Two problems: the perceptron, on which the learner's first numbers were chosen, and a
convolutional network, on which nothing was.

Every run gets the seconds that 16 bit takes for its steps, on the same problem, link and seed. Target: the lowest loss
that 16 bit has reached by 80% of its steps. No other run is looked at for either.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from thinwire.lab.network import links
from thinwire.lab.network.network import Network
from thinwire.lab.repro.claims import OURS, PAPER, Findings, Part, Progress, Stoppable
from thinwire.lab.repro.mqgrad import evaluated, runs
from thinwire.lab.repro.mqgrad.evaluated import CARRIED, EXACT, LEARNER, STILL, RunsByPolicy
from thinwire.lab.repro.mqgrad.runs import Order
from thinwire.lab.tasks import datasets

STEPS, QUICK_STEPS = 400, 60  # of 16 bit
MOST = 12  # times as many steps, where the seconds last
EARLIER, QUICK_EARLIER = 12, 2  # runs, on seeds of their own, that the carried-over policy was learnt in
EARLIER_SEEDS = 1_000_000
FIRST_SEED = 400  # none below was kept from those who built the learner and this command
THIN, FAST = "auto:60mbit", "auto:1gbit"
KNOB_SEEDS = 5  # at most, of what is shown beside the claims
KNOB_FIRST_SEED = 500  # those from FIRST_SEED on had shown what was wrong with errors under feedback

LEARNT = "mqgrad(seed={seed}, policy={policy!r})"


@dataclass(frozen=True)
class Policy:
    """Who sets whose level: `{seed}` and `{policy}` are filled in."""

    controller: str
    scheme: str = "ladder"


def bits(steps: int) -> dict[str, Policy]:
    """By name: every fixed width, a schedule, the learner from its prior and from a policy of earlier runs."""
    return {f"{level} bit": Policy(f"fixed(level={level})") for level in runs.MENU} | {
        f"schedule: 2, from step {steps // 2} on 4": Policy(f"schedule(levels_at=((0, 2), ({steps // 2}, 4)))"),
        STILL: Policy("mqgrad(seed={seed}, rate=0)"),
        LEARNER: Policy("mqgrad(seed={seed})"),
        CARRIED: Policy(LEARNT),
    }


def rules() -> dict[str, Policy]:
    """The rivals that neither learn nor know the run's length."""
    return {
        "random": Policy("uniform(seed={seed})"),
        "norm rule, 4 bits to spend": Policy("normrule(budget=4)"),
        "a level per halving of the RMS": Policy("halvings of rms"),
        "a level per halving of mean/std": Policy("halvings of ratio"),
    }


def levels_of(scheme: str, levels: tuple[float, ...], word: str) -> dict[str, Policy]:
    """Another scheme's levels, each by itself, and the learner over them; 16 bit gives target and seconds."""
    return {
        EXACT: Policy("fixed(level=16)"),
        **{f"{word} {level:g}": Policy(f"fixed(level={level})", scheme) for level in levels},
        STILL: Policy(f"mqgrad(seed={{seed}}, rate=0, levels_from={levels})", scheme),
        LEARNER: Policy(f"mqgrad(seed={{seed}}, levels_from={levels})", scheme),
    }


@dataclass(frozen=True)
class Study:
    """Policies on the same problem, link and seeds."""

    title: str  # how claims name it
    policies: dict[str, Policy]
    link: str = THIN
    problem: str = "mlp"
    steps: int = STEPS
    earlier: int = EARLIER
    source: str = PAPER
    first_seed: int = FIRST_SEED
    most_seeds: int = 1_000

    @property
    def fixed(self) -> list[str]:
        """The rows of the learner's own scheme whose level never changes."""
        scheme = self.policies[LEARNER].scheme
        return [
            n for n, each in self.policies.items() if each.controller.startswith("fixed(") and each.scheme == scheme
        ]

    def add_to(self, found: Findings, data: Path | None) -> None:
        """Of what is stopped, the seeds that all policies have."""
        net = links.resolved(self.link, runs.WORKERS)
        with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
            policy = f"{folder}/policy.pt"
            with found.stop:
                if CARRIED in self.policies:
                    learn_policy(policy, self.earlier, self.steps, net, found.progress)
                seeds = range(self.first_seed, self.first_seed + min(found.seeds, self.most_seeds))
                outcomes = run_policies(self, seeds, policy, net, found.progress, found.stop, data)
                if outcomes[EXACT]:
                    found.claims += evaluated.claims_of(outcomes, self.fixed, self.title, self.source)
                    where = f"{self.problem}, {net}"
                    found.tables += [
                        evaluated.table(outcomes, where),
                        evaluated.by_seed(outcomes, where, self.first_seed),
                    ]


def studies() -> dict[str, Study]:
    some = bits(STEPS)
    every = some | rules()
    knob = Study("", {}, source=OURS, first_seed=KNOB_FIRST_SEED, most_seeds=KNOB_SEEDS)
    densities, ranks = (0.01, 0.03, 0.1, 0.3), (1, 2, 4, 8, 16)
    return {
        "60mbit": Study("60mbit", every),
        "1gbit": Study("1gbit", every, FAST),
        "cnn": Study("cnn, 60mbit", some, problem="cnn"),
        "density": replace(knob, title="density, 60mbit", policies=levels_of("topk", densities, "density")),
        "rank": replace(knob, title="rank, 60mbit", policies=levels_of("powersgd", ranks, "rank")),
    }


def parts(quick: bool, data: Path | None) -> dict[str, Part]:
    """The images are embedded; with `data`, the folder of Fashion-MNIST, all of its test images are evaluated.
    `quick`: one link, and short."""
    if data is not None:
        datasets.fashion_mnist(data)  # says so now if it is not there
    found = studies()
    if quick:
        policies = bits(QUICK_STEPS) | rules()
        # On seeds that do not count: a look at the command is none at what it will be evaluated by.
        found = {"60mbit": Study("60mbit", policies, steps=QUICK_STEPS, earlier=QUICK_EARLIER, first_seed=0)}
    return {name: partial(study.add_to, data=data) for name, study in found.items()}


def learn_policy(policy: str, count: int, steps: int, net: Network, progress: Progress) -> None:
    """Run after run of the perceptron, each from what the last has learnt."""
    with links.opened(net, runs.WORKERS, servers=1) as opened:
        namespaces = opened.by_rank(servers=1) if opened else None
        for seed in range(EARLIER_SEEDS, EARLIER_SEEDS + count):
            progress(f"mqgrad: earlier runs, seed {seed}")
            spec = "mqgrad(seed={seed})" if seed == EARLIER_SEEDS else LEARNT
            order = Order(spec.format(seed=seed, policy=policy), seed, steps, str(net), learnt=policy)
            runs.run_served(order, namespaces)


def run_policies(
    study: Study,
    seeds: Iterable[int],
    policy: str,
    net: Network,
    progress: Progress,
    stop: Stoppable,
    data: Path | None = None,
) -> RunsByPolicy:
    """policy: where the carried-over one lies."""
    outcomes: RunsByPolicy = {name: [] for name in study.policies}
    with links.opened(net, runs.WORKERS, servers=1) as opened, stop:
        namespaces = opened.by_rank(servers=1) if opened else None
        for seed in seeds:  # one seed after the other, so that a busy machine is busy for all policies
            found: dict[str, runs.ServedRun] = {}
            for name in sorted(study.policies, key=lambda name: name != EXACT):  # that of 16 bit first
                progress(f"mqgrad: {name}, {study.problem}, seed {seed}, {net}")
                chosen = study.policies[name]
                order = Order(
                    chosen.controller.format(seed=seed, policy=policy), seed, study.steps, str(net),
                    data=None if data is None else str(data), problem=study.problem, scheme=chosen.scheme,
                )  # fmt: skip
                if EXACT in found:
                    order = replace(order, steps=MOST * study.steps, seconds=found[EXACT].seconds)
                found[name] = runs.run_served(order, namespaces)
            for name, run in found.items():
                outcomes[name].append(run)
    return outcomes
