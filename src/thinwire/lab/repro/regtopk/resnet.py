"""ResNet-18's topology for 32x32 images, at any width."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.tasks.models import Standardize


class Block(nn.Module):
    """Two convolutions with batch norm, around which the input passes."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        straight = stride == 1 and channels == out
        self.around = (
            nn.Identity()
            if straight
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(inner)) + self.around(x))


def resnet18(channels: int, *, width: int, classes: int = 10) -> nn.Module:
    """Eight blocks in four stages of `width`, 2, 4 and 8 times that; ResNet-18 has 64. Width 8: 176,000 weights."""
    stages: list[nn.Module] = []
    inner = width
    for number in range(4):
        out = width << number
        stages += [Block(inner, out, 1 if number == 0 else 2), Block(out, out, 1)]
        inner = out
    return nn.Sequential(
        Standardize(0.45, 0.25),
        nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes),
    )  # fmt: skip
