#!/usr/bin/env bash
# Test and measure one GPU, offline: bash benchmarks/gpu/run.sh OUT
# OUT gets tests.log, gpu.json, gpu.toml (a probe) and gpu.md. Without a GPU it is a dry run with tiny shapes.
# The last line names what failed. PYTHON is the interpreter, python3 by default; its torch is used as it is.
set -uo pipefail
out=$(realpath -m "${1:?give a folder for the results: bash benchmarks/gpu/run.sh OUT}")
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
failed=()

# One after the other, since some look at the GPU's clock. Warnings of other versions are no errors here.
timeout 240 "$python" -m pytest -p no:cacheprovider -p no:benchmark -p no:xdist -W default --durations=5 -rs \
  tests/realrun/test_gpu.py tests/realrun/algorithms/test_quantization_triton.py -m "not nightly and not slow" \
  > "$out/tests.log" 2>&1
code=$?
tail -n 12 "$out/tests.log"
((code == 0 || code == 5)) || failed+=("tests, see $out/tests.log")

"$python" benchmarks/gpu/measure.py --out "$out" ${ONLY:+--only "$ONLY"} || failed+=("measurements, see gpu.json")
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  probe=(--backend nccl)
else
  probe=(--max-size "64 KiB")
fi
"$python" -m realrun probe --quick --nproc 1 "${probe[@]}" --out "$out/gpu.toml" > "$out/probe.log" 2>&1 \
  || failed+=("the probe, see $out/probe.log")
"$python" -m analysis gpu "$out/gpu.json" --out "$out/gpu.md" > /dev/null || failed+=("the page")

if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "All passed; results are in $out"
