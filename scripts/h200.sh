#!/usr/bin/env bash
# How were the records of an H200 made? Part by part, each into a folder of its own below OUT, with a log and a line.
#   scripts/h200.sh OUT tests|sanitize|kernels|suites|shapes|text|quality|invariance|STUDY:PROFILE ...
# tests: exactness. suites: plain decoding, shapes, hetero. shapes, text: every study that has the profile shapes or
# h200, and with text the suite of nine methods, 64 and 256 slots. quality: the texts of nine methods, scored and held
# to full attention; AIME25, MATH500 and LONGBENCH2 name the files. STUDY:PROFILE: one study.
# PYTHON=python3 names the interpreter. Nothing else may run on the GPU, but for the three of `quality`, whose speed is
# nobody's concern. To publish: copy the folders that hold a record.json to results/records, then make simulate figures.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-${VENV:-.venv}/bin/python}
[[ $# -ge 2 ]] || { sed -n '2,8p' "$0" | cut -c3-; exit 2; }
out=$1
shift
mkdir -p "$out/logs"
failed=0

run() { # name of the log, command
  local name=$1 begin=$SECONDS code=0
  shift
  "$@" >"$out/logs/$name.txt" 2>&1 || code=$?
  echo "$name: exit code $code, $((SECONDS - begin)) s"
  [[ $code == 0 ]] || failed=1
  return "$code"
}

study() { # name, profile
  run "$1-$2" "$python" -m experiments.study "$1" profile="$2" output_dir="$out/studies/$1/$2"
}

studies() { # all that have a profile
  local name
  for name in $("$python" -m experiments.study | grep -wE "^\w+ .*$1" | cut -d' ' -f1); do study "$name" "$1"; done
}

suite() { # folder, name, further words
  run "$1" "$python" -m experiments.bench_gpu suite="$2" out="$out/h200/$1" "${@:3}"
}

scored() { # benchmark, file, slots, further words
  run "quality-$1" "$python" -m experiments.run profile=h200 protocol=quality protocol.gate=8 protocol.repeats=1 \
    sampling=greedy verification=greedy benchmark="$1" source=local path="$2" batch="$3" benchmark.max_new_tokens=512 \
    'comparison.methods=[autoregressive,magicdec_stream,magicdec_snapkv,vegas,sparsespec,aspire_fixed,aspire_fsm,aspire,vegas_async]' \
    output_dir="$out/quality/$1" "${@:4}"
}

for part in "$@"; do
  case $part in
    tests) run tests "$python" -m pytest -q -m gpu -n 12 tests/test_gpu.py tests/test_invariant.py ;;
    sanitize) run sanitize scripts/sanitize.sh "$out/logs/sanitize" ;;
    kernels) run kernels "$python" -m experiments.bench_kernels out="$out/h200" ;;
    suites)
      suite autoregressive autoregressive repeats=3
      suite shapes shapes repeats=2
      suite hetero hetero
      ;;
    shapes) studies shapes ;;
    text)
      suite smollm2 smollm2 only=7000-64 repeats=2
      suite smollm2-256 smollm2 only=7000-64 batch=256 benchmark.source.requests=256 protocol.tokens_per_slot=64
      studies h200
      ;;
    quality)
      scored aime25 "${AIME25:?names a file}" 30 benchmark.source.requests=30 &
      scored math500 "${MATH500:?names a file}" 50 benchmark.source.requests=100 &
      scored longbench2_30k "${LONGBENCH2:?names a file}" 48 benchmark.source.requests=48 \
        benchmark.source.min_tokens=1 benchmark.source.max_tokens=null benchmark.source.limit=7000 \
        benchmark.name=longbench2_7k 'benchmark.label="LongBench-v2 (cut to 7k)"' &
      for job in $(jobs -p); do wait "$job" || failed=1; done
      ;;
    invariance) run invariance "$python" -m experiments.invariance ;;
    *:*) study "${part%:*}" "${part#*:}" ;;
    *)
      echo "h200: unknown part '$part'" >&2
      exit 2
      ;;
  esac
done
exit "$failed"
