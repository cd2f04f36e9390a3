"""What some tests need of the machine, said clearly where it is not there."""

import shutil

import pytest

from thinwire.lab.network import shaped

_why_not = shaped.why_not()
shaping = pytest.mark.skipif(_why_not is not None, reason=f"shaped networks cannot be had here: {_why_not}")
chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
