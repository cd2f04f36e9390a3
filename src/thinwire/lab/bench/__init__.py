"""The speed of every kernel."""
