"""Every law runs on every backend: on the reference, and on the compiled kernels once per instruction set.

Under TRITON_INTERPRET=1, which must be there before Triton is imported, on the Triton kernels alone: test_interpreted
starts processes of that kind.
"""

import os

import numpy as np
import pytest
import torch

from thinwire.kernels import native, reference
from thinwire.kernels.backends import fast

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED else ["interpreted"]

# That there are any, test_native asserts: no law may vanish unseen.
INSTRUCTION_SETS = native.module().instruction_sets() if native.module() else []


@pytest.fixture(params=["triton"] if INTERPRETED else ["reference", *(f"native {name}" for name in INSTRUCTION_SETS)])
def backend(request):
    """A module with the operations, which do not check their arguments."""
    if request.param == "triton":
        with np.errstate(all="ignore"):  # the interpreter computes with numpy, and Inf and NaN are meant
            yield fast("cuda")[0]
        return
    if request.param == "reference":
        yield reference
        return
    before = native.module().instruction_set()
    native.module().use_instruction_set(request.param.removeprefix("native "))
    yield native
    native.module().use_instruction_set(before)


@pytest.fixture
def threads():
    """Sets the number of threads; after the test it is what it was."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
