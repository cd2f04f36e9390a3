"""The lab: does compression pay, end to end? Tasks, networks, runs, time-to-accuracy and the report."""
