"""Which paper each reproduction is of. Without PyTorch, so that `thinwire repro --help` need not wait for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    title: str
    authors: str
    quick_seeds: int  # runs per setting, unless given
    full_seeds: int
    parts: tuple[str, ...]  # that can be run by themselves

    @property
    def cited(self) -> str:
        return f"{self.title} ({self.authors})"


PAPERS = {
    "tnq": Paper(
        "Truncated Non-Uniform Quantization for Distributed SGD", "Yan et al., 2024", 2, 5,
        ("errors", "training"),
    ),
    "regtopk": Paper(
        "Regularized Top-k: A Bayesian Framework for Gradient Sparsification", "Bereyhi et al., 2025", 2, 5,
        ("regression", "toy", "images", "finetuning"),
    ),
    "utility": Paper(
        "Beyond Throughput and Compression Ratios: Towards High End-to-end Utility of Gradient Compression",
        "Han et al., 2024", 1, 3, ("costs", "images", "text"),
    ),
    "powergossip": Paper(
        "Practical Low-Rank Communication Compression in Decentralized Deep Learning", "Vogels et al., 2020", 2, 5,
        ("consensus", "spectrum", "fashion", "resnet"),
    ),
    "mqgrad": Paper(
        "MQGrad: Reinforcement Learning of Gradient Quantization in Parameter Server", "Cui et al., 2018", 1, 8,
        ("60mbit", "1gbit", "cnn", "density", "rank"),
    ),
    "local": Paper(
        "DiLoCo: Distributed Low-Communication Training of Language Models; Streaming DiLoCo; SparseLoCo",
        "Douillard et al., 2023 and 2025; Sarfi et al., 2025", 1, 3, ("text", "images"),
    ),
}  # fmt: skip
