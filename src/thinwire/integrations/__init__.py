"""Adapters for those who write the training loop: Lightning, Accelerate, Transformers. Imported only when asked for."""
