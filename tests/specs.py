"""The schemes that laws run over: every one the registry finds, with its defaults, and the variants worth a look."""

from thinwire.schemes import registry

VARIANTS = {
    "qsgd": ("qsgd(bits=1)", "qsgd(bits=3, block=64)", "qsgd(bits=8)"),
}


def every_spec() -> list[str]:
    return [spec for name in registry() for spec in (name, *VARIANTS.get(name, ()))]
