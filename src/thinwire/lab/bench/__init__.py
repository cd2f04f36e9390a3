"""The speed of every kernel, and of whole conversations."""
