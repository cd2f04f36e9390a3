"""The papers' claims on their own set-ups, measured beside expected."""
