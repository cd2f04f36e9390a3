"""Controllers turn a scheme's knob while training. They see numbers only, never tensors."""
