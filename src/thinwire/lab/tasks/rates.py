"""The learning rates that `compare --tune` found for the tasks that come with the lab, by row: times the task's own.

A task's own rate is the one found for fp16 in every step, so a row that is not here was not tuned and has fp16's.
"""

from __future__ import annotations

# Grid and seeds are those of `lab.runs.tune` (for mlp, cnn and regression 1/4 to 4 times the task's own rate); the mean
# score on validation examples of the last three evaluations. `thinwire compare --tune` prints the whole table, and
# docs/guide/compare.md and docs/measured/tasks.md show it. Before cifar10 the best mean was chosen, however close.
RATES: dict[str, dict[str, float]] = {
    "mlp": {  # mlp(width=1024), 120 steps, own rate 0.2
        "fp32": 1.0, "fp16": 1.0, "qsgd(bits=4)": 1.0, "topkc(density=0.1)": 1.0, "powersgd(factor_rank=4)": 1.0,
        "qsgd(bits=4) every 8": 0.5,
    },
    "cnn": {"fp16": 1.0},  # own rate 0.1, which was the 2 of a grid around 0.05
    "regression": {"fp16": 1.0},  # own rate 0.01
    "fashion": {  # 400 steps, own rate 0.1
        "fp16": 1.0, "bf16": 1.0, "qsgd(bits=4)": 1.0, "tnq(bits=2)": 0.5, "tnq(bits=4)": 1.0,
        "topk(density=0.01)": 1.0, "powersgd(factor_rank=4)": 1.0, "thc(bits=4)": 1.0, "qsgd(bits=4) every 8": 0.25,
    },
    "cifar10": {  # 400 steps, own rate 0.05, which was the 1/2 of a grid around 0.1
        "fp16": 1.0, "bf16": 1.0, "qsgd(bits=4)": 1.0, "tnq(bits=2)": 2.0, "tnq(bits=4)": 1.0,
        "topk(density=0.01)": 2.0, "powersgd(factor_rank=4)": 2.0, "thc(bits=4)": 1.0, "qsgd(bits=4) every 8": 0.25,
    },
    "text": {  # text(steps=600) on WikiText-2, own rate 0.008
        "fp16": 1.0, "bf16": 1.0, "qsgd(bits=4)": 1.0, "tnq(bits=2)": 0.5, "tnq(bits=4)": 1.0,
        "topk(density=0.01)": 1.0, "powersgd(factor_rank=4)": 1.0, "thc(bits=4)": 1.0, "qsgd(bits=4) every 8": 1.0,
    },
}  # fmt: skip


def of(task: str, row: str) -> float:
    """How many times the task's own rate a row is trained at."""
    return RATES.get(task, {}).get(row, 1.0)


def known(task: str, row: str) -> bool:
    """Whether a rate was looked for."""
    return row in RATES.get(task, {})
