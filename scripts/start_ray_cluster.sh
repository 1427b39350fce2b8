#!/usr/bin/env bash
# scripts/start_ray_cluster.sh [num_workers]
#
# Starts a Ray cluster with callboard on this machine: a head on GPU 0 and num_workers (default 0) further nodes on
# GPUs 1, 2, 3, …, each with 1 GPU, 1 CPU and 1 worker_unit. Blocks until Ctrl-C, which ends all of it.
# Add nodes while it runs with scripts/add_ray_worker.sh.
#
# From the environment:
#   CALLBOARD_GPUS            auto (default): the GPUs that are visible, or 8 simulated ones; N: N simulated ones
#   CALLBOARD_NAME            name of the cluster on this machine (ray)
#   CALLBOARD_PORT            the controller's port (7700)
#   CALLBOARD_RAY_PORT        Ray's port (6379)
#   CALLBOARD_DASHBOARD_PORT  the dashboard's port (8265), where ray[default] is installed
#   CALLBOARD_PORT_BASE       first port of the nodes' blocks of ten (6400)
#   CALLBOARD_NODE_MEMORY     memory of each node for jobs (4GiB)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; }

case ${1:-0} in
-h | --help) usage; exit 0 ;;
*[!0-9]* | ????*) echo "error: num_workers is a number from 0 to 999, not '$1'" >&2; usage >&2; exit 2 ;;
esac
workers=$((10#${1:-0}))

callboard=$root/.venv/bin/callboard
if [[ ! -x $callboard ]]; then
    "$root/scripts/setup" controller agent
fi
exec "$callboard" up \
    --name "${CALLBOARD_NAME:-ray}" \
    --agents $((workers + 1)) \
    --machine-gpus "${CALLBOARD_GPUS:-auto}" \
    --gpus-per-node 1 --cpus-per-node 1 --resource worker_unit=1 \
    --memory-per-node "${CALLBOARD_NODE_MEMORY:-4GiB}" \
    --port "${CALLBOARD_PORT:-7700}" \
    --ray-port "${CALLBOARD_RAY_PORT:-6379}" \
    --dashboard-port "${CALLBOARD_DASHBOARD_PORT:-8265}" \
    --port-base "${CALLBOARD_PORT_BASE:-6400}"
