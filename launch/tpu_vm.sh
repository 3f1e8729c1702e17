#!/usr/bin/env bash
# Cloud TPU slices through gcloud, from one's own machine; --help says how. Keeps to bash 3.2, which macOS has.
set -euo pipefail

TOPOLOGIES='v4: 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16
v5e: 1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16
v5p: 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24
v6e: 1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16'
MAX_FAILURES=3  # in a row: of runs, each within an hour, of their installation, of the creation of lost slices
SETTLED_S=3600
LOST_LINE=255  # ssh's status for itself
STOOD_S=60  # a connection that was lost after so long counts as a first
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'END'
launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE --topology=TOPOLOGY [OPTION ...] [-- OPTIONS OF dipaco_jax.main]
launch/tpu_vm.sh ssh --name=NAME --zone=ZONE --topology=TOPOLOGY [OPTION ...] -- LINE

Trains on a Cloud TPU slice, or on several, from this machine, which needs gcloud.

  create   asks for the slices; they come when there is room
  install  waits for them, copies this clone to all their hosts, and installs it there
  run      runs `python -m dipaco_jax.main --distributed` with the options behind -- on all hosts, and shows its
           output. Preempted slices are created and installed again, and the same command goes on from where it was.
           A run that fails is started again, up to three times in a row.
           A run survives the connection to it: the same command joins it again. Ctrl-C stops it, with its state saved
  stop     stops a run, with its state saved
  logs     prints the end of every host's output
  status   of the slices, and of the run on each host
  ssh      runs the line of shell behind -- on all hosts, as: ssh ... -- 'df -h'
  delete   gives the slices back; from here on they cost nothing

All commands take the same options, and ignore those that they don't need:

  --name=NAME           of the slices
  --zone=ZONE           as us-west4-a
  --topology=TOPOLOGY   as v5e:2x4, or v5e:8x8*4 for four slices; what --compile_only takes
  --project=PROJECT     by default that of gcloud's configuration
  --spot                cheaper, and may be taken away at any time
  --disk=DISK           a disk of the zone, for a slice of one host: /mnt/dipaco, formatted if it is blank. v6e takes
                        disks of type hyperdisk-balanced only, the others pd-balanced. Not needed where --workdir and
                        the text are in a bucket and the hosts' boot disks have room for the run's scratch
  --nfs=HOST:/SHARE     of a file server, such as Filestore: /mnt/dipaco on all hosts
  --extras=EXTRAS       of the package that is installed (tpu,gcs)
  --runtime=VERSION     of the hosts' image, by default the one that Google names for the kind of TPU
  --gcloud=FLAG         a flag of gcloud, passed to the calls that take it; may be repeated. Flags of connections, such as
                        --gcloud=--tunnel-through-iap, go to ssh and scp; those of gcloud itself, such as
                        --gcloud=--impersonate-service-account=ACCOUNT, to all calls; all others, such as
                        --gcloud=--reserved or --gcloud=--service-account=ACCOUNT, to the creation of slices
  --pause_s=SECONDS     between two looks at slices that are awaited (30)
  --dry_run             prints every command that it would run, and runs none

Exit status: 0 done; 2 wrong option, before any work; 130 stopped by Ctrl-C; 1 something else went wrong, as is said;
`run` ends with the run's own.
END
}

say() { echo "tpu_vm.sh: $*" >&2; }

fail() { say "$1"; exit "${2:-2}"; }

# -- options

parse() {
  command=${1-}
  case $command in
    create | install | run | stop | logs | status | ssh | delete) shift ;;
    *) fail "${command:-nothing} is no command; first comes create, install, run, stop, logs, status, ssh or delete" ;;
  esac
  name='' zone='' topology='' project='' spot='' disk='' nfs='' extras=tpu,gcs runtime='' pause_s=30 dry_run=''
  create_flags=() ssh_flags=() scp_flags=() all_flags=() through_iap='' options=() typed=()
  while (( $# )); do
    case $1 in
      --) shift; options=("$@"); break ;;
      --spot | --dry_run) printf -v "${1#--}" %s yes ;;
      --gcloud=-*) add_flag "${1#*=}" ;;
      --name=?* | --zone=?* | --topology=?* | --project=?* | --disk=?* | --nfs=?* | --extras=?* | \
        --runtime=?* | --pause_s=?*)
        option=${1%%=*}
        printf -v "${option#--}" %s "${1#*=}" ;;
      --config* | --workdir*) fail "$1 is of dipaco_jax.main: write it behind --" ;;
      *) fail "$1 is no option: --help lists them; all but --spot and --dry_run take a =VALUE" ;;
    esac
    typed+=("$1")
    shift
  done
}

check() {
  [[ $name ]] || fail '--name is missing: call the slices something, as --name=dipaco'
  [[ $name =~ ^[a-z][a-z0-9-]*$ ]] || fail "--name=$name: lower-case letters, digits and dashes, a letter first"
  [[ $zone ]] || fail '--zone is missing: where you have quota for TPUs, as --zone=us-west4-a'
  [[ $zone =~ ^[a-z]+-[a-z0-9]+-[a-z0-9]+$ ]] || fail "--zone=$zone is no zone: write it as us-west4-a"
  [[ $topology ]] || fail '--topology is missing: the TPU, as --topology=v5e:2x4'
  check_topology
  [[ ! $disk || ! $nfs ]] || fail '--disk and --nfs are both /mnt/dipaco: choose one'
  [[ ! $disk || $one_host ]] || fail '--disk is for a slice of one host: use --nfs'
  place=${disk:+disk}$nfs  # what tpu_host.sh mounts
  [[ ! $nfs || $nfs =~ ^[^:/]+:/.+ ]] || fail "--nfs=$nfs: write it as HOST:/SHARE"
  [[ $pause_s =~ ^[0-9]+$ ]] || fail "--pause_s=$pause_s should be whole seconds"
  case $command in
    run) check_run ;;
    ssh) (( ${#options[@]} )) || fail "write the line of shell behind --: for instance -- 'df -h'" ;;
    *) (( ! ${#options[@]} )) || fail "${options[0]}: only run takes options of dipaco_jax.main" ;;
  esac
  [[ $dry_run ]] || type gcloud > /dev/null 2>&1 || fail 'gcloud is missing: install the Google Cloud CLI, and log in'
}

check_topology() {
  local kind=${topology%%:*} shape=${topology#*:} shapes chips=1 dim host_chips=4
  slices=1
  if [[ $shape == *\** ]]; then slices=${shape#*\*} shape=${shape%%\**}; fi
  shapes=$(while IFS=: read -r one rest; do [[ $one != "$kind" ]] || echo "$rest"; done <<< "$TOPOLOGIES")
  [[ $shape =~ ^[0-9x]+$ && " $shapes " == *" $shape "* && $slices =~ ^[1-9][0-9]*$ ]] ||
    fail "--topology=$topology is not known. KIND:SHAPE or KIND:SHAPE*SLICES of these: ${TOPOLOGIES//$'\n'/; }"
  for dim in ${shape//x/ }; do (( chips *= dim )); done
  case $kind in v5e | v6e) host_chips=8 ;; esac  # at most, of a slice of one host
  one_host=''
  if (( slices == 1 && chips <= host_chips )); then one_host=yes; fi
  case $kind in  # v4 and v5p are counted in cores, two to a chip
    v4) accelerator=v4-$(( 2 * chips )) runtime=${runtime:-tpu-ubuntu2204-base} ;;
    v5e) accelerator=v5litepod-$chips runtime=${runtime:-v2-alpha-tpuv5-lite} ;;
    v5p) accelerator=v5p-$(( 2 * chips )) runtime=${runtime:-v2-alpha-tpuv5} ;;
    v6e) accelerator=v6e-$chips runtime=${runtime:-v2-alpha-tpuv6e} ;;
  esac
  reached_by=tpu-vm everywhere=(--worker=all)
  # `tpu-vm ssh` reaches one slice, and takes --tunnel-through-iap in gcloud's alpha version alone.
  if [[ $through_iap ]] || (( slices > 1 )); then
    reached_by=queued-resources everywhere+=(--node=all --batch-size=all)
  fi
}

check_run() {
  local option config='' workdir=''
  for option in ${options[@]+"${options[@]}"}; do
    case $option in
      --config=*) config=${option#*=} ;;
      --workdir=*) workdir=${option#*=} ;;
    esac
  done
  [[ $config ]] || fail '--config is missing behind --: for instance -- --config=configs/tiny.py'
  [[ $config == configs/* && -e $ROOT/${config%%:*} ]] ||
    fail "--config=$config: name a file of this clone's configs/, which install copies"
  [[ $workdir ]] || fail '--workdir is missing behind --: for instance --workdir=gs://BUCKET/runs/one'
  [[ $workdir == /mnt/* || $workdir == *://* ]] ||
    fail "--workdir=$workdir goes when the slices go: name one in a bucket, or below /mnt/dipaco (--disk or --nfs)"
  [[ $workdir != /mnt/dipaco* || $disk || $nfs ]] || fail "--workdir=$workdir: nothing is there without --disk or --nfs"
}

# -- gcloud

add_flag() {  # to the flags of the calls of gcloud that take it
  case ${1%%=*} in
    --zone | --project) fail "--gcloud=$1: write $1" ;;
    --account | --access-token-file | --billing-project | --configuration | --impersonate-service-account | \
      --log-http | --no-log-http | --trace-token | --verbosity)
      all_flags+=("$1") ;;
    --tunnel-through-iap) through_iap=yes ssh_flags+=("$1") scp_flags+=("$1") ;;
    --internal-ip | --plain | --force-key-file-overwrite | --ssh-key-file | --ssh-key-expiration | \
      --ssh-key-expire-after | --strict-host-key-checking)
      ssh_flags+=("$1") scp_flags+=("$1") ;;
    --ssh-flag) ssh_flags+=("$1") ;;
    --scp-flag | --compress) scp_flags+=("$1") ;;
    *) create_flags+=("$1") ;;
  esac
}

quoted() {  # words for a shell, quoted where they need it
  local word words=()
  for word in "$@"; do
    # shellcheck disable=SC2001  # of ${word//...}, versions of bash make different things
    [[ $word =~ ^[A-Za-z0-9_./:=,@+-]+$ ]] || word="'$(sed "s/'/'\\\\''/g" <<< "$word")'"
    words+=("$word")
  done
  echo "${words[*]}"
}

call() {  # runs a command; in a dry run prints it
  if [[ $dry_run ]]; then quoted "$@" >&3; else "$@"; fi
}

tpus() {
  call gcloud compute tpus "$@" "--zone=$zone" ${project:+"--project=$project"} \
    ${all_flags[@]+"${all_flags[@]}"} --quiet
}

on_hosts() {  # a line of shell
  tpus "$reached_by" ssh "$name" "${everywhere[@]}" ${ssh_flags[@]+"${ssh_flags[@]}"} "--command=$1"
}

to_hosts() {  # a file, into home directories
  tpus "$reached_by" scp "$1" "$name:" "${everywhere[@]}" ${scp_flags[@]+"${scp_flags[@]}"}
}

host() { quoted bash dipaco_jax/launch/tpu_host.sh "$@"; }

described() {  # a state, of `queued-resources` or `tpu-vm`: ABSENT where there is none, UNKNOWN without an answer
  local found
  if found=$(tpus "$1" describe "$2" "--format=value($3)" 2> "$scratch/errors"); then
    echo "${found:-UNKNOWN}"
  elif grep -q NOT_FOUND "$scratch/errors"; then
    echo ABSENT
  else
    cat "$scratch/errors" >&2
    echo UNKNOWN
  fi
}

state() {  # of all slices in one word, READY where they can be used
  local found i node=$name
  found=$(described queued-resources "$name" state.state)
  if [[ $found == ACTIVE || $dry_run ]]; then
    for (( i = 0; i < slices; i++ )); do
      (( slices == 1 )) || node=$name-$i
      found=$(described tpu-vm "$node" state)
      if [[ $found == ABSENT ]]; then found=TERMINATED; fi
      [[ $found == READY || $dry_run ]] || break
    done
  fi
  if [[ $dry_run ]]; then echo READY; else echo "$found"; fi
}

is_lost() { [[ " SUSPENDING SUSPENDED PREEMPTED TERMINATED STOPPING STOPPED " == *" $1 "* ]]; }

no_tpu() {
  [[ $1 == FAILED ]] || fail "there is no $name in $zone: $(again create)" 1
  fail "no TPU was given to $name: $(again status) tells why, $(again delete) ends the request" 1
}

awaited() {  # says what is waited for, once for each state, and lets time pass
  [[ $last_said || $1 != UNKNOWN ]] || fail 'gcloud does not answer as it should: mend that first' 1
  [[ $1 == "$last_said" ]] || say "$name is $1; waiting"
  last_said=$1
  sleep "$pause_s"
}

wait_until_ready() {
  local now
  while now=$(state); [[ $now != READY ]]; do
    [[ $now != ABSENT && $now != FAILED ]] || no_tpu "$now"
    ! is_lost "$now" || fail "$name was taken away: $(again delete), then create it again" 1
    awaited "$now"
  done
}

again() { quoted launch/tpu_vm.sh "$1" "${typed[@]}"; }  # another command on the same slices, to be typed

costs() { [[ $dry_run ]] || say "$name stays, and costs, until: $(again delete)"; }

# -- commands

create() {
  local flags=("--node-id=$name")
  (( slices == 1 )) || flags=("--node-count=$slices" "--node-prefix=$name")
  flags+=("--accelerator-type=$accelerator" "--runtime-version=$runtime" ${spot:+--spot})
  [[ ! $disk ]] || flags+=("--data-disk=source=projects/$(project_id)/zones/$zone/disks/$disk,mode=read-write")
  tpus queued-resources create "$name" "${flags[@]}" ${create_flags[@]+"${create_flags[@]}"}
}

project_id() {
  if [[ $project || $dry_run ]]; then echo "${project:-PROJECT}"; return; fi
  gcloud config get-value project ${all_flags[@]+"${all_flags[@]}"} 2> /dev/null
}

delete() { tpus queued-resources delete "$name" --force; }

install() {
  local tar=dipaco_jax.tar.gz
  call tar -czf "$scratch/$tar" -C "$ROOT" --exclude=__pycache__ \
    pyproject.toml setup.cfg constraints.txt README.md dipaco_jax configs launch && to_hosts "$scratch/$tar" &&
    # A run that is on would find half of the old files, and half of the new.
    on_hosts "mkdir -p dipaco_run dipaco_jax
flock -n dipaco_run/lock true || { echo 'a run is on: stop it first' >&2; exit 2; }
cd dipaco_jax && rm -rf dipaco_jax configs launch && tar -xzf ../$tar && cd .. &&
$(host install "$extras" "$place")"
}

run() {  # looks at how things are, and does what is next
  local now lost='' failures=0
  while true; do
    now=$(state)
    if is_lost "$now" || [[ $lost && $now == FAILED ]]; then
      say "$name is $now: creating it again"
      lost=yes
      delete || sleep "$pause_s"
    elif [[ $lost && $now == ABSENT ]]; then
      create || { failed "creating $name again failed, for what gcloud says above" 1 create; sleep "$pause_s"; }
    elif [[ $now == ABSENT || $now == FAILED ]]; then
      no_tpu "$now"
    elif [[ $now != READY ]]; then
      awaited "$now"
    elif [[ $lost ]]; then
      if install; then lost=''; else failed 'the run could not be installed' 1 logs; fi
    else
      run_once
    fi
  done
}

run_on_hosts() { on_hosts "$(host run "$place" "${options[@]}")"; }

run_once() {  # ends the script where nothing is to be done again
  local status=0 began=$SECONDS
  last_said=READY
  set -m  # a process group of its own, which Ctrl-C leaves alone
  run_on_hosts < /dev/null &
  follower=$!
  set +m
  wait "$follower" || status=$?
  follower=''
  case $status in
    0 | 2 | 130) costs; exit "$status" ;;
    127) fail "there is no program on $name: $(again install)" 1 ;;
  esac
  sleep "$pause_s"  # slices are called preempted a moment after their hosts are gone
  if (( SECONDS - began > SETTLED_S )); then failures=0; fi
  if [[ $(state) == READY ]]; then
    if (( status == LOST_LINE )); then  # is no end of the run, which is joined
      if (( SECONDS - began > STOOD_S )); then failures=0; fi
      failed 'the connection was lost' "$status" run
      return
    fi
    stop || true  # on hosts that have not noticed
    failed "the run ended (status $status)" "$status" logs
  fi
}

failed() {  # WHAT STATUS NEXT, which is a command: the third time it is the end
  if (( ++failures == MAX_FAILURES )); then
    [[ $3 == create ]] || costs
    fail "$1, $failures times: $(again "$3")" "$2"
  fi
  say "$1: once more"
}

dry_run_of_run() {
  echo '# where the slices are there' >&3
  state > /dev/null
  run_on_hosts
  echo '# where they are preempted, as often as that happens, and then as above' >&3
  delete
  create
  state > /dev/null
  install
  echo '# at Ctrl-C' >&3
  stop
}

stop() { on_hosts "$(host stop)"; }

logs() { on_hosts "$(host logs)"; }

status() {
  tpus queued-resources describe "$name"
  if [[ $(state) == READY ]]; then on_hosts "$(host status)"; fi
}

# shellcheck disable=SC2329  # a trap calls it
interrupted() {
  trap 'kill -- "-$follower" 2> /dev/null; say "the run may be on: $(again stop)"; costs; exit 130' INT TERM
  if [[ $follower ]]; then
    say 'the run is being stopped, with its state saved; Ctrl-C once more leaves it to itself'
    if stop; then say 'the run is stopped; the same command goes on'; else say "it may be on: $(again stop)"; fi
    kill -- "-$follower" 2> /dev/null || true
    wait "$follower" || true
  fi
  costs
  exit 130
}

main() {
  local word
  for word in "$@"; do
    case $word in
      --help | -h) usage; exit 0 ;;
      --) break ;;  # what follows is not for this script
    esac
  done
  parse "$@"
  check
  exec 3>&1
  scratch=$(mktemp -d) follower='' last_said=''
  trap 'rm -rf "$scratch"' EXIT
  trap interrupted INT TERM
  case $command in
    create) create; costs ;;
    install) wait_until_ready; install ;;
    run) if [[ $dry_run ]]; then dry_run_of_run; else run; fi ;;
    stop) stop; costs ;;
    logs) logs ;;
    status) status ;;
    ssh) on_hosts "${options[*]}" ;;
    delete) delete ;;
  esac
}

main "$@"; exit
