"""What a profiler saw on a device: which streams worked while another still had to."""

from collections import defaultdict


def overlapped(events):
    """{"encoded", "sent"}: how many kernels of other streams, NCCL's among them or not, began before training's last.

    events: of a Chrome trace. Training's stream is the one with the most kernels' time that is not NCCL's.
    """
    streams = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            streams[event["args"]["stream"]].append((event["ts"], event["dur"], event["name"]))
    own = {stream: sum(length for _, length, name in run if not _nccl(name)) for stream, run in streams.items()}
    training = max(own, key=own.__getitem__)
    last = max(begin for begin, _, _ in streams.pop(training))
    early = [name for run in streams.values() for begin, _, name in run if begin < last]
    sent = sum(map(_nccl, early))
    return {"encoded": len(early) - sent, "sent": sent}


def _nccl(name):
    return name.startswith("nccl")
