"""MQGrad (Cui et al., 2018): its claims, measured beside expected."""

from thinwire.lab.repro.mqgrad.mqgrad import parts

__all__ = ["parts"]
