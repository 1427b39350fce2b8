#!/usr/bin/env bash
# scripts/deploy/slurm/up.sh: asks Slurm for one node more. For `callboard autoscale --provider command --up …`, which
# sets CALLBOARD_NODE and CALLBOARD_CONTROLLER. Arguments go to sbatch: a partition, a time, GPUs per node.
set -euo pipefail
: "${CALLBOARD_NODE:?}" "${CALLBOARD_CONTROLLER:?}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec sbatch --parsable --job-name="callboard-$CALLBOARD_NODE" --export=ALL "$@" "$here/agent.sbatch"
