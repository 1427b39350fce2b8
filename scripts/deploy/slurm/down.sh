#!/usr/bin/env bash
# scripts/deploy/slurm/down.sh: gives the node CALLBOARD_NODE back to Slurm. The agent gets a SIGTERM, says goodbye and
# ends; a job that is still in the queue is taken out of it.
set -euo pipefail
: "${CALLBOARD_NODE:?}"
ours=(--user="$(id -un)" --name="callboard-$CALLBOARD_NODE")
# Pending jobs have no process to signal: they are cancelled. First, lest one starts between the two commands.
scancel "${ours[@]}" --state=PENDING
exec scancel "${ours[@]}" --state=RUNNING --signal=TERM --batch
