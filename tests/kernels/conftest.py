"""Every kernel test runs once per instruction set of this processor."""

import pytest

from thinwire.kernels import native


def pytest_generate_tests(metafunc):
    if "instructions" in metafunc.fixturenames:
        module = native.module()
        metafunc.parametrize("instructions", module.instruction_sets() if module else [], indirect=True)


@pytest.fixture
def instructions(request):
    """The native kernels, on one instruction set."""
    module = native.module()
    before = module.instruction_set()
    module.use_instruction_set(request.param)
    yield module
    module.use_instruction_set(before)
