"""The mathematics: what schemes are made of. Nothing here knows the network."""
