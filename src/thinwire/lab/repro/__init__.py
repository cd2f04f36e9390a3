"""The papers' claims, as near to their set-ups as two cores allow, measured beside expected."""
