"""Shared set-up: one thread per process, since many ranks share few cores."""

import torch

torch.set_num_threads(1)
