"""The interpreter takes milliseconds per program: few examples unless told `--hypothesis-profile=long`.

In the end it is printed which operations were called with generated arguments: test_interpreted wants all of them.
"""

import pytest
from hypothesis import HealthCheck, settings

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
settings.register_profile("few", max_examples=5, **QUIET)
settings.register_profile("long", max_examples=150, **QUIET)
settings.load_profile("few")

_called = set()


class Noting:
    """A backend, and whose operations were asked for."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        if name in self._backend.__all__:  # hypothesis asks for names of its own
            _called.add(name)
        return getattr(self._backend, name)


@pytest.fixture
def backend(backend, request):
    generated = getattr(request.function, "is_hypothesis_test", False)
    return Noting(backend) if generated else backend


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"with generated arguments: {' '.join(sorted(_called))}")
