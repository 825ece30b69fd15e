#!/usr/bin/env bash
# Example of a sweep: model x benchmark, one Hydra job and one comparison of the methods each. Extra arguments are
# overrides.
set -euo pipefail
cd "$(dirname "$0")/.."

models=qwen3_1p7b,qwen3_8b
benchmarks=aime25,longbench_16k
methods=[autoregressive,magicdec_stream,vegas,aspire]

make setup
exec "${VENV:-.venv}/bin/python" -m experiments.run -m model="$models" benchmark="$benchmarks" \
  comparison.methods="$methods" "$@"
