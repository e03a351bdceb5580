#!/bin/sh
# TaskProlog=/etc/slurm/memcalc/prolog.sh: asks memcalc once more where the job starts, as its user, with its files.
#
# Slurm runs it on the node, as the user, before every task. Its exit 1 ends the batch script before it begins: the job
# is FAILED, our sentence stands in its output, and the node stays as it was. It asks for the batch script's task alone,
# so that a job is asked about once, however many tasks its steps have.
set -fu
PATH=/usr/local/bin:/usr/bin:/bin
# A batch script has no number of a step, or SLURM_BATCH_SCRIPT, by Slurm's release.
case "${SLURM_STEP_ID:-}" in '' | -5 | 4294967291) ;; *) exit 0 ;; esac
[ -n "${SLURM_JOB_ID:-}" ] || exit 0

here=$(dirname -- "$0")
MODE=reject ON_FAILURE=pass JOBS=gpu TIMEOUT=3 SCONTROL=scontrol
[ -r "$here/memcalc.conf" ] || exit 0
# shellcheck source-path=SCRIPTDIR source=memcalc.conf
. "$here/memcalc.conf"
[ "$MODE" != off ] || exit 0
[ "$MODE" = reject ] || ON_FAILURE=pass
gpus=${SLURM_GPUS_ON_NODE:-}
[ -n "$gpus" ] || [ "$JOBS" = all ] || exit 0

# What sbatch's command line may have changed. A number of GPUs that the script says itself stays as it is said there,
# with the type of GPU.
script=$(timeout -s KILL "$TIMEOUT" "$SCONTROL" write batch_script "$SLURM_JOB_ID" - 2>/dev/null)
request="--nodes=${SLURM_JOB_NUM_NODES:-1}"
if [ -n "${SLURM_GPUS:-}" ]; then
    request="$request --gpus=$SLURM_GPUS"
elif [ -n "${SLURM_GPUS_PER_NODE:-}" ]; then
    request="$request --gpus-per-node=$SLURM_GPUS_PER_NODE"
elif [ -n "$gpus" ] && ! printf '%s\n' "$script" | grep -Eq "^#SBATCH.*gpu:([^:, ]+:)?$gpus(,|[[:space:]]|\$)"; then
    request="$request --gres=gpu:$gpus"
fi

one_line() { printf '%s' "$1" | tr -d '\n' && echo; }
answer=
[ -z "$script" ] || answer=$({
    one_line "$PWD"
    one_line "" # the user runs this
    one_line "$request"
    printf '%s\n' "$script"
} | "$here/ask.sh" 2>/dev/null)
case "$answer" in
*" "*": memcalc: "*) ;;
*) answer="$ON_FAILURE failed: memcalc: no answer from $here/ask.sh" ;;
esac
# Slurm reads standard output: "print" puts the rest of the line into the job's own
printf 'print %s\n' "${answer#*: }"
case "$answer" in "reject "*) exit 1 ;; esac
exit 0
