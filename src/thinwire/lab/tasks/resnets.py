"""Residual networks with batch norm for 32x32 images, at any width: ResNet-18's topology and ResNet-20's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.tasks.models import Standardize


class Block(nn.Module):
    """Two convolutions, and a way past them for the input."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3, 1)
        straight = stride == 1 and inputs == outputs
        self.past = nn.Identity() if straight else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.past(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def resnet18(channels: int, *, width: int, classes: int = 10) -> nn.Sequential:
    """Two blocks in each of four stages of `width`, 2, 4 and 8 times that; ResNet-18 has 64. For images as bytes.
    Width 8: 176,000 weights."""
    stages = _stages([width << stage for stage in range(4)], blocks=2)
    return nn.Sequential(Standardize(0.45, 0.25), *_residual(channels, width, stages, 8 * width, classes))


def resnet20(widths: Sequence[int]) -> nn.Sequential:
    """Three blocks in each stage; ResNet-20 has 16, 32 and 64 channels. For images that are floats already. With half
    of them: 69,000 weights."""
    return nn.Sequential(*_residual(3, widths[0], _stages(widths, blocks=3), widths[-1], 10))


def _stages(widths: Sequence[int], blocks: int) -> Iterator[nn.Module]:
    """All but the first halve the image."""
    inputs = widths[0]
    for stage, outputs in enumerate(widths):
        for block in range(blocks):
            yield Block(inputs, outputs, 2 if stage and not block else 1)
            inputs = outputs


def _residual(channels: int, width: int, stages: Iterator[nn.Module], out: int, classes: int) -> list[nn.Module]:
    first = [_convolution(channels, width, 3, 1), nn.ReLU()]
    return [*first, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out, classes)]
