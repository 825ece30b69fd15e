#!/usr/bin/env bash
# Run every Triton kernel on small cases under compute-sanitizer: memcheck (reads and writes outside of memory) and
# racecheck (threads of a block that meet in shared memory without a barrier). Needs a GPU and CUDA's compute-sanitizer.
#   scripts/sanitize.sh [FOLDER FOR THE LOGS]        PYTHON=python3 JOBS=6
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-${VENV:-.venv}/bin/python}
jobs=${JOBS:-6}
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
command -v compute-sanitizer >/dev/null || { echo "sanitize: compute-sanitizer is not installed" >&2; exit 2; }

# Every tensor an allocation of its own, so that one step past its end is outside of memory.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

# Compile first, in several processes: under the sanitizer that would take minutes.
pids=()
for ((i = 0; i < jobs; i++)); do
  "$python" tests/sanitize_cases.py "part=$i/$jobs" >"$logs/plain-$i.log" 2>&1 &
  pids+=($!)
done
for ((i = 0; i < jobs; i++)); do
  wait "${pids[i]}" || { cat "$logs/plain-$i.log" >&2; echo "sanitize: part $i fails without the sanitizer" >&2; exit 1; }
done
total=$(cat "$logs"/plain-*.log | grep -c '^ran ')
echo "compiled and ran $total cases in ${SECONDS} s"

# Both tools at once, each over all cases, in `jobs` processes.
tools=(memcheck racecheck)
pids=()
for tool in "${tools[@]}"; do
  for ((i = 0; i < jobs; i++)); do
    compute-sanitizer --tool "$tool" --target-processes application-only --error-exitcode 9 \
      "$python" tests/sanitize_cases.py "part=$i/$jobs" >"$logs/$tool-$i.log" 2>&1 &
    pids+=($!)
  done
done
failed=0
for ((n = 0; n < ${#pids[@]}; n++)); do
  wait "${pids[n]}" || failed=1
done
for tool in "${tools[@]}"; do
  ran=$(cat "$logs/$tool"-*.log | grep -c '^ran ' || true)
  echo "$tool: $ran of $total cases ran"
  grep -hE '^=+ (ERROR SUMMARY|RACECHECK SUMMARY|Error|Internal|Warning)' "$logs/$tool"-*.log | sort | uniq -c || true
  [[ $ran == "$total" ]] || failed=1
done
if ((failed)); then
  grep -hE -m 20 '^=+ +(Invalid|Error:|Warning:|Address|at |Program hit)' "$logs"/{memcheck,racecheck}-*.log | head -40 || true
  echo "sanitize: FAILED after ${SECONDS} s, logs in $logs" >&2
  exit 1
fi
echo "sanitize: clean after ${SECONDS} s, logs in $logs"
