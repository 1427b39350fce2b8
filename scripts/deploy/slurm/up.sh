#!/usr/bin/env bash
# scripts/deploy/slurm/up.sh: asks Slurm for one node more. For `callboard autoscale --provider command --up …`, which
# sets CALLBOARD_NODE and CALLBOARD_CONTROLLER. Arguments go to sbatch: a partition, a time, GPUs per node.
#
# Give autoscale the controller by an address that Slurm's nodes reach (--controller head:7700): the agents get the same.
# CALLBOARD_LOOPBACK=yes lets a loopback address pass, where Slurm's only node is this machine.
set -euo pipefail
: "${CALLBOARD_NODE:?}" "${CALLBOARD_CONTROLLER:?}"
case ${CALLBOARD_LOOPBACK:-no}:$CALLBOARD_CONTROLLER in
no:127.* | no:localhost:* | no:*'[::1]:'*)
    echo "error: other nodes can't reach the controller at $CALLBOARD_CONTROLLER; start autoscale with --controller" \
        "and an address that they can" >&2
    exit 2
    ;;
esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec sbatch --parsable --job-name="callboard-$CALLBOARD_NODE" --export=ALL "$@" "$here/agent.sbatch"
