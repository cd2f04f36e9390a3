"""What a step would cost: measured pieces, replayed on a virtual clock."""
