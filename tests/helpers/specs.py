"""The schemes that laws run over: every one the registry finds, with its defaults, and the variants worth a look."""

from thinwire.schemes import parse, registry

VARIANTS = {
    "powersgd": ("powersgd(factor_rank=2, sided='one')",),
    "qsgd": ("qsgd(bits=1)", "qsgd(bits=3, block=64)", "qsgd(bits=8)", "qsgd(bits=3, range='norm')"),
    "randomk": ("randomk(density=0.1, values='qsgd(bits=4)')",),
    "regtopk": ("regtopk(density=0.1, mu=4, denominator='current')", "regtopk(density=0.1, guard=1000)"),
    "topk": (
        "topk(density=0.1, values='qsgd(bits=4)')",
        "topk(density=0.1, places='plain')",
        "topk(density=0.1, mean='senders')",
    ),
    "topkc": ("topkc(density=0.2, chunk=8, values='fp32')", "topkc(density=0.2, chunk=8, shuffle=True)"),
    "tnq": (
        "tnq(bits=1)",
        "tnq(bits=3, group=64)",
        "tnq(group='tensor')",
        "tnq(bits=8, scale='mean')",
        "tnq(model='powerlaw')",
        "tnq(model='powerlaw', levels='biscaled', bits=3)",
        "tnq(budget=3.2)",
    ),
    "tq": ("tq(bits=3, group='tensor')",),
    "nq": ("nq(group='tensor')",),
    "nuqsgd": ("nuqsgd(bits=3, group='tensor')", "nuqsgd(bits=7, range='max')"),
    "thc": ("thc(bits=2, rotate=30)", "thc(bits=8)", "thc(saturate=True)", "thc(levels='table')"),
    "eden": ("eden(bits=3, rotate=30)",),
    "terngrad": ("terngrad(clip=2.5)",),
    "natural": ("natural(bits=3)",),
}

# These choose over a whole bucket: in other buckets they choose other entries.
BUCKETWISE = ("regtopk", "topk", "topkc")


def every_spec() -> list[str]:
    own = [name for name, scheme in registry().items() if scheme.__module__.startswith("thinwire.schemes.")]
    return [spec for name in own for spec in (name, *VARIANTS.get(name, ()))]


def by_scheme() -> dict[str, list[str]]:
    """{name: its specs}"""
    specs: dict[str, list[str]] = {}
    for spec in every_spec():
        specs.setdefault(parse(spec).name, []).append(spec)
    return specs


def saturates(spec: str) -> bool:
    """Whether running sums are clipped: that is no one worker's loss, and no error memory learns of it."""
    return getattr(parse(spec), "saturate", False)


def telescopes(spec: str) -> bool:
    """Whether what came and what is owed add up to what was given: not where sums are clipped, nor means over few."""
    return not saturates(spec) and getattr(parse(spec), "linear", True)


def sum_rounding(spec: str, exact: float) -> float:
    """What a 16-bit sum may round on the wire, where no worker can know it; `exact` for all other schemes."""
    scheme = parse(spec)
    wire = getattr(scheme, "values", "") if scheme.name in ("randomk", "topkc") else scheme.name
    return {"fp16": 1e-3, "bf16": 1e-2}.get(wire, exact)
