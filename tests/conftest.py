"""Shared set-up: one thread per process, since many ranks share few cores; helpers importable from every folder."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "laws"))

torch.set_num_threads(1)
