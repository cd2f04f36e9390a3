"""What a step would cost: measured pieces, played through on a virtual clock."""
