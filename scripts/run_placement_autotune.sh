#!/usr/bin/env bash
# scripts/run_placement_autotune.sh CONFIG [OPTION…]
#
# Finds the fastest placement of a workflow and prints "Best placement for this task is:" with the
# section to paste. CONFIG is a file, or the name of a config in $CONFIG_PATH (default:
# examples/autoplace/rlinf). Without an argument the names are listed. Options are those of
# `callboard autoplace`: --nodes 8+8, --apply, --plot plan.svg, …
#
# Examples:
#   scripts/run_placement_autotune.sh reasoning
#   CONFIG_PATH=~/RLinf/examples/reasoning/config/math scripts/run_placement_autotune.sh qwen2.5-7b-grpo --nodes 8x8
#   scripts/run_placement_autotune.sh train.yaml --nodes 8 --apply
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${CONFIG_PATH:-$here/examples/autoplace/rlinf}

case ${1:-} in
-h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit ;;
esac

if [[ -d $folder ]]; then folder=$(cd "$folder" && pwd); fi
if (($# == 0)); then
    [[ -d $folder ]] || { echo "error: there is no folder $folder; CONFIG_PATH names another" >&2; exit 2; }
    echo "Configs in $folder:"
    (cd "$folder" && find . -type f \( -name '*.yaml' -o -name '*.yml' \) | sed 's|^\./||; s|\.ya\{0,1\}ml$||' | sort |
        sed 's/^/  /')
    echo "Run: $0 CONFIG"
    exit
fi

config=$1
shift
callboard=$here/.venv/bin/callboard
if [[ ! -x $callboard ]]; then
    callboard=$(command -v callboard) || {
        echo "error: callboard is not installed; run $here/scripts/setup autoplace hydra" >&2
        exit 1
    }
fi
if [[ -f $config ]]; then exec "$callboard" autoplace "$config" "$@"; fi
exec "$callboard" autoplace "$config" --config-path "$folder" "$@"
