"""PowerGossip (Vogels, Karimireddy and Jaggi, 2020): its claims, measured beside expected."""

from thinwire.lab.repro.powergossip.powergossip import parts

__all__ = ["parts"]
