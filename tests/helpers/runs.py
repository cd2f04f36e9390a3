"""Made-up runs and records of `thinwire compare`."""

from thinwire.lab.runs.record import CurvePoint, Record, Run, RunPlan


def made_up(
    scheme, seconds, scores, *, seed=0, reason=None, target=0.8, metric="accuracy", rising=True, exchange="allreduce",
    controller=None, levels=None,
):  # fmt: skip
    """A run whose evaluated steps are `seconds` apart."""
    levels = levels or [0.0] * len(scores)
    curve = [
        CurvePoint(10 * n, seconds * n, 1e6 * n, 1.0 / n, score, level)
        for n, (score, level) in enumerate(zip(scores, levels, strict=True), 1)
    ]
    steps = 10 * len(scores)
    totals = {
        "steps": steps, "seconds": seconds * len(scores), "compute_seconds": 0.2 * seconds * len(scores),
        "encode_seconds": 0.1 * seconds * len(scores), "wire_seconds": 0.7 * seconds * len(scores),
        "bytes_sent": 1e6 * len(scores), "bytes_dense": 4e6, "vnmse": 0.01,
    }  # fmt: skip
    plan = RunPlan("mlp", scheme, seed, exchange, controller=controller)
    return Run(plan, metric, rising, target, steps, curve, {} if reason else totals, reason)


def record_of(*runs):
    schemes = list(dict.fromkeys(run.plan.scheme for run in runs))
    exchanges = list(dict.fromkeys(run.plan.exchange for run in runs))
    config = {"tasks": ["mlp"], "schemes": schemes, "exchanges": exchanges, "network": "none", "seeds": 1,
              "workers": 4, "why_paced": None}  # fmt: skip
    return Record(config, list(runs))


FP16 = made_up("fp16", 2.0, [0.5, 0.8, 1.1])
