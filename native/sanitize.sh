#!/bin/sh
# Builds the kernels under ASan and UBSan and runs their tests on that build. Usage: native/sanitize.sh PYTHON [pytest options]
#
# The package is copied beside the sanitized module, so that the installed build is left alone. Leaks are not looked for:
# the interpreter has its own. Any error ends the process, and with it the run.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1
shift
build=$root/build/sanitize
cmake -S "$root/native" -B "$build" -DTHINWIRE_SANITIZE=ON -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" >/dev/null
cmake --build "$build" -j 2

package=$build/package
rm -rf "$package"
mkdir -p "$package"
cp -r "$root/src/thinwire" "$package/"
cp "$build"/_native*.so "$package/thinwire/kernels/"

compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
export LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so) $("$compiler" -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
cd "$root"
exec "$python" - "$package" "$@" <<'RUN'
import sys

package, options = sys.argv[1], sys.argv[2:]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, package)

import pytest

from thinwire.kernels import _native, native

assert _native.__file__.startswith(package) and native.module() is _native, f"not the sanitized build: {_native.__file__}"
sys.exit(pytest.main(["-p", "no:cacheprovider", "tests/kernels", "-m", "not full", *options]))
RUN
