"""Han et al., 2024, on the utility of gradient compression: its claims, measured beside expected."""

from thinwire.lab.repro.utility.utility import parts

__all__ = ["parts"]
