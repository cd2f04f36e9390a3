"""Links as slow as asked for."""
