"""Gossip: averaging weights with neighbours on any graph."""
