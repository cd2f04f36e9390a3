"""On real cards: NCCL, streams, and a host that never waits. Not run without cards: `pytest -m gpu`."""

import json

import pytest
import torch

from helpers.ranks import launch, outcome

pytestmark = pytest.mark.gpu

SPECS = [
    "fp16", "qsgd(bits=4)", "tnq(bits=4)", "tnq(group='tensor')", "tnq(model='powerlaw')", "topk(density=0.05)",
    "powersgd(factor_rank=2)", "thc(bits=4)",
    "eden(bits=2)", "eden(bits=2, rotate=14)", "topkc(density=0.2, chunk=8)", "randomk(density=0.1)",
]  # fmt: skip
SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import thinwire as tw

spec, backend, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
device = torch.device("cuda", rank)
dist.init_process_group(backend)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
model = DDP(net, device_ids=[rank], bucket_cap_mb=0.3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator("cpu").manual_seed(rank)
x = torch.randn(64, 256, generator=generator).to(device)
y = torch.randint(10, (64,), generator=generator).to(device)
losses = []
with tw.attach(model, spec) as wire:
    for step in range(12):
        # The first steps make buckets, memory and kernels; after them nothing may make the host wait.
        torch.cuda.set_sync_debug_mode("error" if 3 <= step < 11 and backend != "gloo" else "default")
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.set_sync_debug_mode("default")
    state = wire.state_dict()
found = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).cpu()
print(json.dumps({"weights": found.double().sum().item(), "bits": hash(found.numpy().tobytes()),
                  "first": losses[0].item(), "last": losses[-1].item(), "bytes": wire.stats()["bytes_sent"]}))
dist.destroy_process_group()
"""


ADVISED = """
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import thinwire as tw

rank = int(os.environ["RANK"])
dist.init_process_group(sys.argv[1])
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Dropout(0.5), torch.nn.Linear(512, 10)).to(f"cuda:{rank}")
model = DDP(net, device_ids=[rank])
before = [p.detach().clone() for p in net.parameters()], torch.cuda.get_rng_state(rank)
found = tw.advise(model, torch.randn(64, 256, device=f"cuda:{rank}"), schemes=["qsgd(bits=4)", "tnq(group='tensor')"])
assert all(torch.equal(a, b) for a, b in zip(before[0], net.parameters()))
assert torch.equal(before[1], torch.cuda.get_rng_state(rank))
print(json.dumps(found.as_json()))
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_advice_on_two_cards(backend):
    told = []
    for process in launch(ADVISED, 2, backend):
        code, out, err = outcome(process, 300)
        assert code == 0, err
        told.append(json.loads(out.splitlines()[-1]))
    assert told[0]["rows"] == told[1]["rows"] and len(told[0]["rows"]) == 3
    assert all(row["seconds"] > 0 for row in told[0]["rows"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
@pytest.mark.parametrize("spec", SPECS)
def test_two_cards_train_alike_and_nobody_waits(spec, backend, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    told = []
    for process in launch(SCRIPT, 2, spec, backend):
        code, out, err = outcome(process, 300)
        assert code == 0, err
        told.append(json.loads(out.splitlines()[-1]))
    assert told[0]["bits"] == told[1]["bits"], "replicas must be the same to the bit"
    assert all(rank["last"] < rank["first"] and rank["bytes"] > 0 for rank in told)


OVERLAPPED = """
import json, os, sys, tempfile
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import thinwire as tw
from helpers.trace import overlapped

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
net = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(12))).to(f"cuda:{rank}")
model = DDP(net, device_ids=[rank], bucket_cap_mb=16)
x = torch.randn(4096, 2048, device=f"cuda:{rank}")
with tw.attach(model, sys.argv[1]) as wire:
    for _ in range(4):
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        model(x).square().mean().backward()
        torch.cuda.synchronize()
with tempfile.TemporaryDirectory() as folder:
    seen.export_chrome_trace(f"{folder}/trace.json")
    print(json.dumps(overlapped(json.load(open(f"{folder}/trace.json"))["traceEvents"])))
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
@pytest.mark.parametrize("spec", ["qsgd(bits=4)", "topk(density=0.05)", "powersgd(factor_rank=2)"])
def test_encoding_and_sending_overlap_with_backward(spec):
    for process in launch(OVERLAPPED, 2, spec):
        code, out, err = outcome(process, 300)
        assert code == 0, err
        overlap = json.loads(out.splitlines()[-1])
        assert overlap["encoded"] and overlap["sent"], "while training's own stream still had to do"
