"""The interpreter takes milliseconds per program: few examples unless told `--hypothesis-profile=long`."""

from hypothesis import HealthCheck, settings

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
settings.register_profile("few", max_examples=5, **QUIET)
settings.register_profile("long", max_examples=150, **QUIET)
settings.load_profile("few")
