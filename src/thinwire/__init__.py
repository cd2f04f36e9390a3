"""thinwire trains PyTorch models over thin wires."""
