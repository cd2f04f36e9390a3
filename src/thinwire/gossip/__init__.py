"""Decentralised training: mix weights with neighbours."""
