"""The command `thinwire`, also as `python -m thinwire`."""

from __future__ import annotations

import sys

LAB = ("jinja2", "plotly", "rich", "typer")  # what thinwire[lab] brings


def main() -> None:
    """Run the command, or say in one line what must be installed for it."""
    try:
        from thinwire import cli

        cli.main()
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in LAB:
            raise
        needs = f"the command needs {missing.name}, which training does not: pip install 'thinwire[lab]'"
        print(f"thinwire: {needs}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
