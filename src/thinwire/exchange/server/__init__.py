"""The parameter server: the workers' half, the servers' half, and what travels between them."""
