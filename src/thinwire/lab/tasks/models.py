"""The models of the lab's tasks. Images come in as bytes (but in `small_cnn`): the first layer makes them numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Standardize(nn.Module):
    """Bytes to floats of about zero mean and unit variance."""

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, images: Tensor) -> Tensor:
        return (images.float() * (1 / 255) - self.mean) / self.std


def mlp(width: int, *, pixels: int = 784, classes: int = 10) -> nn.Module:
    """pixels - width - width - classes. Width 2048: 5.8 M weights, nearly all in one matrix."""
    return nn.Sequential(
        Standardize(0.286, 0.353),
        nn.Flatten(),
        nn.Linear(pixels, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, classes),
    )  # fmt: skip


def cnn(*, channels: int = 1, size: int = 28, hidden: int = 184, classes: int = 10) -> nn.Module:
    """Two convolutions and two linear layers; 0.6 M weights on 28x28."""
    return nn.Sequential(
        Standardize(0.286, 0.353),
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (size // 4) ** 2, hidden), nn.ReLU(),
        nn.Linear(hidden, classes),
    )  # fmt: skip


def small_cnn(
    channels: int, size: int, *, widths: tuple[int, int] = (16, 32), kernel: int = 3, hidden: int = 64
) -> nn.Sequential:
    """Two strided convolutions, the first of `kernel`, and two linear layers, for images that are floats already.

    On 28x28: 0.1 M weights; with widths (8, 16), kernel 5 and hidden 32 27,000.
    """
    side = -(-size // 4)
    return nn.Sequential(
        nn.Conv2d(channels, widths[0], kernel, stride=2, padding=kernel // 2), nn.ReLU(),
        nn.Conv2d(*widths, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(widths[1] * side * side, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    )  # fmt: skip


class ByteTransformer(nn.Module):
    """A decoder-only transformer over bytes: [batch, context] in, [batch, context, 256] logits out."""

    def __init__(self, *, width: int, layers: int, heads: int, context: int):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        # Not a registered buffer: DDP would send it to everybody in every step.
        future = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        x = self.embed(text.int()) + self.position
        return self.out(self.norm(self.blocks(x, mask=future, is_causal=True)))
