#!/usr/bin/env bash
# Test and measure NCCL between the GPUs of this node, offline: bash benchmarks/gpu/run_several.sh OUT
# OUT gets several.log, several.json and several.toml (a probe). Without two GPUs it is a dry run over Gloo on CPUs.
set -uo pipefail
out=$(realpath -m "${1:?give a folder for the results: bash benchmarks/gpu/run_several.sh OUT}")
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
failed=()

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus < 2)); then
  ranks=2 options=(--quick) probe=(--max-size "64 KiB")
  export CUDA_VISIBLE_DEVICES=
else
  ranks=$gpus options=() probe=(--backend nccl)
  timeout 300 "$python" -m pytest -p no:cacheprovider -p no:benchmark -p no:xdist -W default -rs tests/realrun/test_gpu.py \
    > "$out/several.log" 2>&1 || failed+=("tests, see $out/several.log")
  tail -n 12 "$out/several.log"
fi
# Once as it is, once with one queue of launches, as Megatron sets it: communicators that wait for each other would stall.
for connections in 8 1; do
  CUDA_DEVICE_MAX_CONNECTIONS=$connections timeout 240 "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    benchmarks/gpu/several.py --out "$out/connections$connections" "${options[@]}" 2>> "$out/several.log" \
    || failed+=("measurements with $connections connections, see $out/several.log")
done
"$python" -m realrun probe --quick --nproc "$ranks" "${probe[@]}" --out "$out/several.toml" > "$out/probe.log" 2>&1 \
  || failed+=("the probe, see $out/probe.log")

if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "All passed; results are in $out"
