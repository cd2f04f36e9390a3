"""The threads that help kernels: kept, shared by all callers, gone after a fork, and no burden at exit."""

import subprocess
import sys

import pytest
import torch

from thinwire.kernels import native

# The module by itself, in a process that has no other threads: PyTorch's would be counted, too.
BEGIN = """
import array, importlib.util, os, sys, threading

spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
N, K = 2_000_000, 50_000
x, out = array.array("f", range(N)), array.array("i", bytes(4 * K))
finite = lambda: native.all_finite(x.buffer_info()[0], N, 4)
tasks = lambda: set(os.listdir("/proc/self/task"))
"""

# Three helpers come with the first call, and are there after the last.
KEPT = """
assert len(tasks()) == 1
finite()
kept = tasks()
assert len(kept) == 4
for _ in range(500):
    finite()
assert tasks() == kept
"""

# Eight callers at once: their answers are right, and there are no more threads than for one of them.
SHARED = """
finite()
before, wrong, right = tasks(), [], []

def call(number):
    out = array.array("i", bytes(4 * K))
    for _ in range(30):
        native.top_k(x.buffer_info()[0], 0, 0, 0, N, 0, -1, 1, K, out.buffer_info()[0], 4)
        if out != array.array("i", range(N - K, N)) or not finite():
            wrong.append(number)
    right.append(number)

callers = [threading.Thread(target=call, args=(number,)) for number in range(8)]
[caller.start() for caller in callers]
[caller.join() for caller in callers]
assert not wrong and len(right) == 8, (wrong, right)
assert tasks() - {str(caller.native_id) for caller in callers} == before  # one that was joined may still be ending
"""

# Children that are forked in the middle of another caller's work begin without threads, and then have their own.
FORKED = """
busy = True

def work():
    while busy:
        finite()

caller = threading.Thread(target=work)
caller.start()
ends = []
for _ in range(50):
    child = os.fork()
    if child == 0:
        alone = len(tasks())
        fine = all(finite() for _ in range(3))
        os._exit(0 if (alone, fine, len(tasks())) == (1, True, 4) else 1)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
busy = False
caller.join()
assert ends == [0] * 50, ends
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")


def run(script: str) -> None:
    command = [sys.executable, "-c", BEGIN + script, native.module().__file__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("script", [KEPT, SHARED, FORKED], ids=["kept", "shared", "forked"])
def test_helpers_are(script):
    run(script)


def test_a_process_ends_well_whether_helpers_sleep_or_not():
    for _ in range(10):
        run("finite()")


def test_a_thread_for_every_million_entries(threads):
    threads(64)
    assert native._threads(torch.empty(1_000_000)) == 1
    assert native._threads(torch.empty(4_000_000)) == 4
    threads(2)
    assert native._threads(torch.empty(4_000_000)) == 2
