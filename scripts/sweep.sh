#!/usr/bin/env bash
# Example of a sweep: model x benchmark x method, one Hydra job per cell. Edit the lists; extra arguments are overrides.
set -euo pipefail
cd "$(dirname "$0")/.."

models=qwen3_1_7b,qwen3_8b
benchmarks=aime25,longbench_16k
methods=autoregressive,magicdec,vegas,aspire

make setup
exec "${VENV:-.venv}/bin/python" -m experiments.run -m model="$models" benchmark="$benchmarks" method="$methods" "$@"
