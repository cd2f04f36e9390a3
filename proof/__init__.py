"""Proof under load: commands that break what can be broken, and say in a table what held. See docs/guide/trust.md."""
