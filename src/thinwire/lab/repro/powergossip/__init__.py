"""PowerGossip (Vogels, Karimireddy and Jaggi, 2020): its claims, measured beside expected."""

from thinwire.lab.repro.powergossip.powergossip import reproduce

__all__ = ["reproduce"]
