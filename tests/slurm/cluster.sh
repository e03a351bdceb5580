#!/usr/bin/env bash
# One Slurm controller and one node on this host, for as long as standard input stays open:
#
#     tests/slurm/cluster.sh FOLDER CONTROLLER_PORT NODE_PORT
#
# Everything it writes is in FOLDER, whose etc/ may already hold job_submit.lua and more.conf (lines that are added to
# slurm.conf). It prints "ready" when the node is idle. When standard input is closed, or anything fails, it ends the
# daemons that it started.
set -euo pipefail
folder="$1" controller_port="$2" node_port="$3"
PATH="$PATH:/usr/sbin:/sbin"
etc="$folder/etc" log="$folder/log" state="$folder/state"
node="$(hostname -s)" user="$(id -un)"
export SLURM_CONF="$etc/slurm.conf"
mkdir -p "$etc" "$log" "$state/slurmctld" "$state/slurmd" "$state/munge"

daemons=()
# shellcheck disable=SC2317 # reached by the trap
stop() {
    trap - EXIT
    for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do
        kill "${daemons[i]}" 2>/dev/null || true
        for _ in $(seq 50); do kill -0 "${daemons[i]}" 2>/dev/null || break; sleep 0.1; done
        kill -KILL "${daemons[i]}" 2>/dev/null || true
    done
}
trap stop EXIT
trap 'exit 1' INT TERM HUP

daemon() { # a daemon in the foreground of a background job, so that its number is known
    local name="$1"
    shift
    "$@" </dev/null >"$log/$name.out" 2>&1 &
    daemons+=("$!")
}

cat >"$etc/slurm.conf" <<END
ClusterName=memcalc
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$controller_port
SlurmdPort=$node_port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$state/munge/socket
StateSaveLocation=$state/slurmctld
SlurmdSpoolDir=$state/slurmd
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$log/slurmctld.log
SlurmdLogFile=$log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
MessageTimeout=30
KillWait=2
GresTypes=gpu
NodeName=$node NodeAddr=127.0.0.1 CPUs=1 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=$node Default=YES MaxTime=5 State=UP
END
[ ! -e "$etc/job_submit.lua" ] || echo "JobSubmitPlugins=lua" >>"$etc/slurm.conf"
[ ! -e "$etc/more.conf" ] || cat "$etc/more.conf" >>"$etc/slurm.conf"
mkdir -p "$state/dev"
touch "$state"/dev/gpu{0..7} # stand for devices: nothing opens them
echo "NodeName=$node Name=gpu File=$state/dev/gpu[0-7]" >"$etc/gres.conf"
# slurmd loads a cgroup plugin even where nothing uses it; "disabled" came with 24.05
case "$(slurmd -V)" in
*" 2"[0-3].*) printf '%s\n' "CgroupPlugin=cgroup/v1" "CgroupMountpoint=$state/cgroup" ;;
*) echo "CgroupPlugin=disabled" ;;
esac >"$etc/cgroup.conf"

(umask 077 && head -c 128 /dev/urandom >"$state/munge/key")
chmod 711 "$state/munge"
daemon munged munged --foreground --key-file="$state/munge/key" --socket="$state/munge/socket" \
    --pid-file="$state/munge/pid" --log-file="$log/munged.log" --seed-file="$state/munge/seed" --num-threads=2
for _ in $(seq 100); do [ -S "$state/munge/socket" ] && break; sleep 0.1; done
daemon slurmctld slurmctld -D -c
daemon slurmd slurmd -D

for _ in $(seq 300); do
    for number in "${daemons[@]}"; do
        kill -0 "$number" 2>/dev/null || { echo "a daemon has ended; see $log" >&2; exit 1; }
    done
    if [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ]; then
        echo ready
        cat >/dev/null
        exit 0
    fi
    sleep 0.1
done
echo "the node did not become idle; see $log" >&2
exit 1
