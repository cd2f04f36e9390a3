"""What fault tests run in processes of their own: a scheme that breaks, and attaching again and again."""

import contextlib
import os
import socket
import threading
from dataclasses import dataclass
from typing import ClassVar

import thinwire as tw
from helpers.training import train
from thinwire.core.request import Sum
from thinwire.core.scheme import Scheme


@dataclass(frozen=True)
class Broken(Scheme):
    """Works for two steps, then raises on rank 0."""

    unbiased: ClassVar[bool] = True
    summary: ClassVar[str] = "for tests"

    def converse(self, bucket, memory, level):
        if bucket.step == 2 and bucket.worker == 0:
            raise ArithmeticError("the scheme is broken")
        return (yield Sum(bucket.flat.mul_(1 / bucket.workers)))


def cycles(model, count):
    """Native and Python threads after each of `count` attach-close cycles, and the lanes still there."""
    threads = []
    for cycle in range(count):
        with tw.attach(model, "qsgd"):
            if cycle % 10 == 0:
                train(model, 1)
        threads.append(len(os.listdir("/proc/self/task")))
    return threads, [thread.name for thread in threading.enumerate() if "thinwire" in thread.name]


def connections() -> dict[tuple, int]:
    """This process's sockets that are connected: {(own address, the other's): file descriptor}."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            found[one.getsockname(), one.getpeername()] = int(name)
    return found


def cut(descriptor: int) -> None:
    """Break a connection as a network would: neither end has closed it, neither can go on."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        one.shutdown(socket.SHUT_RDWR)
