#!/usr/bin/env bash
# What does the page of `make report` look like? Takes the picture that README shows, docs/report.png.
# Needs runs/report.html and a Chromium on the PATH, or one named in CHROMIUM.
set -euo pipefail
cd "$(dirname "$0")/.."

chromium=${CHROMIUM:-$(command -v chromium-headless-shell || command -v chromium || command -v google-chrome || true)}
[[ -n $chromium ]] || { echo "screenshot: no Chromium found; install one, or name it: CHROMIUM=/path/to/it" >&2; exit 2; }
[[ -f runs/report.html ]] || { echo "screenshot: no runs/report.html; run make report first" >&2; exit 2; }

flags=(--headless --hide-scrollbars --force-color-profile=srgb --window-size=1280,960)
[[ $(id -u) -ne 0 ]] || flags+=(--no-sandbox) # Chromium's sandbox does not start for root
"$chromium" "${flags[@]}" --screenshot=docs/report.png "file://$PWD/runs/report.html"
