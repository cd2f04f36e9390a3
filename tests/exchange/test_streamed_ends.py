"""What a lane of accelerators leaves behind, on a device that is played: after a failure, a close, another's step."""

import gc

import pytest
import torch

from helpers.played import SIDE, TRAINING, Played, TooEarly, on_a_device
from helpers.trace import overlapped
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.exchange.lane import Streamed
from thinwire.exchange.transport import Transport
from thinwire.reducer import Reducer


def writes(buffer):
    """A conversation that is at a bucket, and has more to say."""

    def begin(scratch):
        buffer.add_(1)
        yield []
        buffer.add_(1)
        return buffer

    return begin


def broken(scratch):
    raise ValueError("no such thing")
    yield


@pytest.mark.parametrize("how", ["fails", "is closed"])
def test_training_goes_on_after_a_step_that_was_broken_off(how, monkeypatch):
    """Its stream waits for the side before anybody hears of it: what the side is at may be used again, and freed."""
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        buffer, told = torch.zeros(10), []
        device.bring(buffer)

        def done(error):
            told.append((str(error), device.known[TRAINING][SIDE] == device.known[SIDE][SIDE]))

        lane = Streamed(Transport(), device)
        lane.submit(writes(buffer), last=False, done=done)
        with pytest.raises(TooEarly, match="on training against"):
            buffer.clone()
        if how == "fails":
            lane.submit(broken, last=False, done=done)
        else:
            lane.close()
        buffer.mul_(2)
    assert len(told) == (2 if how == "fails" else 1)
    assert all(knows and ("no such thing" in error or "closed" in error) for error, knows in told)


def test_everybody_hears_of_a_failure_of_the_device_itself():
    class Lost:
        def turn(self):
            raise RuntimeError("an illegal memory access")

        def join(self):
            raise RuntimeError("an illegal memory access")

    lane, told = Streamed(Transport(), Lost()), []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        lane.submit(broken, last=False, done=lambda error: told.append(str(error)))
    assert told == ["an illegal memory access"]


def test_memory_that_training_made_is_let_go_of_when_the_side_has_read_it(monkeypatch):
    """What is remembered of tensors, one by one, is laid end to end in the first step, while backward goes on."""
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        memory, layout = Memory(), Layout.of([("a", (4,)), ("b", (3,))])
        for name, shape in (("a", 4), ("b", 3)):
            state = torch.ones(shape)
            device.bring(state)
            memory.add(name, {"residual": state})
        training = torch.zeros(7)
        device.bring(training)
        del state
        with device.turn():
            memory.flat("residual", layout)
        gc.collect()
        training.add_(1)  # in memory of its own, which might have been theirs


def test_the_same_where_buckets_are_made_anew(monkeypatch):
    """As DDP does after its first step: what lay end to end is cut and laid otherwise."""
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        memory, training = Memory(), torch.zeros(7)
        device.bring(training)
        for name in "abc":
            memory.add(name, {"residual": torch.ones(4)})
        device.bring(*(tensor for _, tensor in memory.items()))
        for names in ("ab", "c", "bc", "a", "abc"):
            with device.turn():
                memory.flat("residual", Layout.of([(name, (4,)) for name in names])).add_(1)
            gc.collect()
            training.add_(1)
        device.join()
    assert [tensor.tolist() for _, tensor in memory.items()] == [[4.0] * 4] * 3


def test_memory_that_is_let_go_of_too_early_is_found(monkeypatch):
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        one, training = torch.ones(4), torch.zeros(7)
        device.bring(one, training)
        with device.turn():
            two = one * 2
        del one
        with pytest.raises(TooEarly, match="may use memory again"):
            training.add_(1)
        device.join()
        three = two * 2
        del two
        with device.turn():  # after training's stream, and so after that
            three.add_(1)


def test_what_the_host_takes_to_start_a_step_is_not_what_training_waits(monkeypatch):
    with monkeypatch.context() as patch, on_a_device(patch) as device:
        reducer = Reducer({"w": torch.zeros(40, 40)}, "qsgd(bits=4)", None, exchange=Played(device, 3))
        gradient = torch.ones(40, 40)
        device.bring(gradient)
        reducer.reduce({"w": gradient})
        assert reducer.stats()["exposed_seconds"] == 0, "the device, which knows, has not got there"


def test_two_lanes_of_one_device_start_in_the_order_of_their_jobs(monkeypatch):
    """Two models in one backward: whatever each has to say goes out in the order in which their buckets come."""
    log = []

    class Named:
        def __init__(self, name):
            self.name = name

        def amounts(self):
            return {}

        def start(self):
            log.append(self.name)
            return self

        def wait(self):
            """Streams do."""

    def talk(name):
        def begin(scratch):
            for number in range(2):
                yield [Named((name, number))]

        return begin

    with monkeypatch.context() as patch, on_a_device(patch) as device:
        lanes = [Streamed(Transport(), device) for _ in range(2)]
        for _ in range(2):
            log.clear()
            for name, lane, last in (("a", 0, False), ("x", 1, False), ("b", 0, True), ("y", 1, True)):
                lanes[lane].submit(talk(name), last=last, done=lambda error: None)
            assert log == [("a", 0), ("x", 0), ("b", 0), ("a", 1), ("b", 1), ("y", 0), ("x", 1), ("y", 1)]


def test_what_a_profiler_saw_is_read_for_the_tests_on_cards():
    def kernel(stream, begin, length, name):
        return {"cat": "kernel", "ts": begin, "dur": length, "name": name, "args": {"stream": stream}}

    backward = [kernel(7, 10 * number, 9, "gemm") for number in range(10)]
    begun = [kernel(13, 20, 2, "_quantize"), kernel(13, 95, 2, "_dequantize"), kernel(17, 23, 900, "ncclDevKernel")]
    assert overlapped([*backward, *begun, {"cat": "cpu_op", "ts": 0}]) == {"encoded": 1, "sent": 1}
    late = [kernel(13, 100, 2, "_quantize"), kernel(17, 103, 900, "ncclDevKernel")]
    assert overlapped([*backward, *late]) == {"encoded": 0, "sent": 0}
