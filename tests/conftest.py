"""Shared set-up: one thread per process, since many ranks share few cores; asserts of helpers say what they saw."""

import pytest
import torch

pytest.register_assert_rewrite("helpers")
torch.set_num_threads(1)
