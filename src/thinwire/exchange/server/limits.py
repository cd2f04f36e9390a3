"""What a peer may make us hold: every size is held against one of these before anything is allocated for it."""

from __future__ import annotations

import os

TEXT_BYTES = 1 << 22  # of one operation's description: some 50,000 tensors in one bucket
SPEC_CHARACTERS = 1000  # of a codec's name and options
DIMENSIONS = 64  # of one tensor
KNOWN_OPERATIONS = 4096  # that the ends of a connection remember
KNOWN_TEXT_BYTES = 1 << 24  # of all their descriptions together
HEADER_BYTES = 1 << 26  # of a snapshot: what is in it and where, without the tensors
BOOKKEEPING_BYTES = 4096  # what a push costs beside its bytes, so that empty ones are not free


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
