#!/usr/bin/env bash
# scripts/add_ray_worker.sh
#
# Adds one node to the cluster that scripts/start_ray_cluster.sh started, on the lowest GPU that is free, and returns
# when the node takes work. May be run many times, also at once.
#
# From the environment:
#   CALLBOARD_NAME            name of the cluster on this machine (ray)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case ${1:-} in
"") ;;
-h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
*) echo "error: scripts/add_ray_worker.sh takes no arguments" >&2; exit 2 ;;
esac

callboard=$root/.venv/bin/callboard
if [[ ! -x $callboard ]]; then
    echo "error: no cluster runs: callboard is not installed here; start one with scripts/start_ray_cluster.sh" >&2
    exit 1
fi
exec "$callboard" add-worker --name "${CALLBOARD_NAME:-ray}"
