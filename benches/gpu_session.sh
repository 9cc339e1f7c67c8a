#!/usr/bin/env bash
# Everything that is to be known on a GPU: do the kernels' tests pass, how fast is each kernel beside PyTorch's own
# attention and a copy, does the engine give the tokens of transformers. One JSON, in under 8 minutes.
#
#   benches/gpu_session.sh [--out FILE] [--budget SECONDS] [--only PARTS]   where a GPU, torch, triton and transformers are
#   benches/gpu_session.sh --dry-run [--out FILE]                       on a CPU, tiny sizes, in Triton's interpreter
#
# Nothing is fetched: the newest wheel in dist/ is used if there is one (make wheel; git ignores that folder), else the
# working tree, where the engine's part needs the compiled core. PYTHON names the interpreter.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
wheel=$(ls -t "$root"/dist/*.whl 2>/dev/null | head -n 1)
path=$root
if [[ -n $wheel && " $* " != *" --dry-run "* ]]; then
  if "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheel"; then
    path=$site
  else
    echo "the wheel $wheel could not be installed: going on with the working tree" >&2
  fi
fi
PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 "$python" "$root/benches/gpu/session.py" "$@"
