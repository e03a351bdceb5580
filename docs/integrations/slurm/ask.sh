#!/bin/sh
# Asks memcalc about one batch script, in bounded time, and says in one line what is to be done:
#
#     pass|warn|reject verdict|unknown|failed|slow: SENTENCE
#
# Standard input: a line each with the job's working directory, the number of its user and its true request (sbatch
# options that the command line may have changed), all of which may be empty; then the script. What users write is data
# here: it is never part of a command that a shell reads.
set -fu
umask 077
PATH=/usr/local/bin:/usr/bin:/bin

# Under the time limit, and with no pipe of the caller's, stands all that may wait for a file system or a name service.
# Whoever runs this as root gives root up before a file that the user named is opened.
run() { # FOLDER USER DIRECTORY CONFIG_HOME COMMAND...
    if [ "$(id -u)" = 0 ] && [ "${2:-0}" != 0 ]; then
        account=$(getent passwd "$2")
        HOME=$(printf '%s' "$account" | cut -d : -f 6)
        group=$(printf '%s' "$account" | cut -d : -f 4)
        export HOME
        chown -R "$2" "$1/job" && chmod 711 "$1" || exit 125
        [ -z "$group" ] || exec setpriv --reuid="$2" --regid="$group" --init-groups "$0" run "$@"
        exec setpriv --reuid="$2" --regid="$2" --clear-groups "$0" run "$@"
    fi
    [ -z "$3" ] || cd -- "$3" 2>/dev/null || cd "$1/job" || exit 125
    config=${4:-${XDG_CONFIG_HOME:-}}
    shift 4
    # a script may name a config file that never ends: 2 GiB of memory, 1 MiB of output
    # shellcheck disable=SC3045 # dash, bash and busybox have it
    ulimit -v 2097152
    ulimit -f 2048
    exec env -i PATH="$PATH" HOME="${HOME:-/}" LANG=C.UTF-8 OPENBLAS_NUM_THREADS=1 PYTHONNOUSERSITE=1 \
        ${config:+"XDG_CONFIG_HOME=$config"} "$@"
}
if [ "${1:-}" = run ]; then
    shift
    run "$@"
fi

here=$(dirname -- "$0")
MEMCALC=memcalc MODE=reject ON_UNKNOWN=pass ON_FAILURE=pass TIMEOUT=3 OPTIONS='' CONFIG_HOME=''

answer() { # DECISION KIND SENTENCE: the decision is pass or reject, and MODE may soften it
    case "$1:$MODE" in
    reject:reject) decision=reject ;;
    reject:warn) decision=warn ;;
    *) decision=pass ;;
    esac
    printf '%s %s: %s\n' "$decision" "$2" "$3"
    [ "$decision" != reject ]
    exit
}
failed() { answer "$ON_FAILURE" "${2:-failed}" "memcalc: $1"; }
first() { # FILE: its first line of memcalc's, without what could disturb a terminal or a log
    LC_ALL=C grep -a -m 1 '^memcalc: ' "$1" | LC_ALL=C tr -d '\000-\037\177' | cut -c 1-500
}

[ -r "$here/memcalc.conf" ] || failed "$here/memcalc.conf cannot be read"
# shellcheck source-path=SCRIPTDIR source=memcalc.conf
. "$here/memcalc.conf"
case "$TIMEOUT" in '' | 0 | *[!0-9]*) TIMEOUT=3 ;; esac
[ "$MODE" != off ] || answer pass verdict "memcalc: off"

# slurmctld runs this: a TMPDIR of the user's need not be there
folder=$(mktemp -d /tmp/memcalc-ask.XXXXXX) || failed "no folder can be made in /tmp"
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
mkdir "$folder/job"
IFS= read -r directory
IFS= read -r user
IFS= read -r request
# The true request goes behind the script's own #SBATCH lines: as for sbatch, what is said last holds.
{
    printf '%s\n' "$request"
    cat
} | awk '
    function say(   count, word, i) {
        count = split(request, word, " ")
        for (i = 1; i <= count; i++) print "#SBATCH " word[i]
    }
    NR == 1 { request = $0; next }
    !said && !/^[ \t]*(#|$)/ { say(); said = 1 }
    { print }
    END { if (!said) say() }
' >"$folder/job/job.sbatch" || failed "the script could not be copied to /tmp"

case "$user" in *[!0-9]*) failed "the number of the user is '$user'" ;; esac

# shellcheck disable=SC2086 # OPTIONS is the administrator's, and is split at blanks
timeout -s KILL "$TIMEOUT" "$0" run "$folder" "$user" "$directory" "$CONFIG_HOME" \
    "$MEMCALC" check "$folder/job/job.sbatch" --brief $OPTIONS </dev/null >"$folder/out" 2>"$folder/err"
code=$?
sentence=$(first "$folder/out")

# A traceback ends with 1 too: a verdict is the number and the sentence together.
case "$code:$sentence" in
0:memcalc:*) answer pass verdict "$sentence" ;;
1:"memcalc: does not fit"*) answer reject verdict "$sentence" ;;
137:*) failed "no answer within $TIMEOUT s, or killed" slow ;;
esac
sentence=$(first "$folder/err")
case "$code:$sentence" in
[23]:memcalc:*) answer "$ON_UNKNOWN" unknown "$sentence" ;;
*) failed "no answer, exit $code from $MEMCALC" ;;
esac
