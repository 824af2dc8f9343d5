#!/usr/bin/env bash
# The six runs, one by one: run.sh 1..6 [options of naught bench stages]
#   1 zero1   2 zero2   3 zero2-offload   4 zero3   5 zero3-offload   6 zero3-fp16
# Prints what is allocated after forward, backward and step, and the time of 20 iterations. `naught bench stages` takes all of
# them, and DDP, side by side.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
runs=(zero1 zero2 zero2-offload zero3 zero3-offload zero3-fp16)
if [[ ! "${1:-}" =~ ^[1-6]$ ]]; then
    echo "usage: run.sh 1..6 [options of naught bench stages]" >&2
    exit 2
fi
name="${runs[$1 - 1]}"
shift
naught="$here/../../.venv/bin/naught"
[[ -x "$naught" ]] || naught=naught
exec "$naught" bench stages --only "$name" --config "$here/$name.json" "$@"
