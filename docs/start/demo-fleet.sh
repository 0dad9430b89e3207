#!/usr/bin/env bash
# A fleet in a minute: three agentds with different plugins and one gateway, without etcd, Docker, GPU or
# root, and nothing outside a temporary folder. Whatever is not as it says ends it with status 1.
set -euo pipefail
cd "$(dirname "$0")/../.."

began=$SECONDS
folder=$(mktemp -d /tmp/agentd-fleet-XXXXXX)
chmod 755 "$folder"
name=fleet-${folder##*-}                 # a node's id is one daemon's on a machine
nodes=("$name-a" "$name-b" "$name-c")
for variable in "${!AGENTD@}" "${!AGENTCTL@}"; do unset "$variable"; done
export AGENTCTL_FLEET=unix:$folder/gateway.sock
kernels=(trainer tuner sharer packed-1 packed-2)
declare -A daemons=()
gateway=""

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
shown() {
  local word line=""
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=,-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  printf '\033[2m$%s\033[0m\n' "$line"
}
run() { shown "$@"; "$@"; }
node() { env -u AGENTCTL_FLEET agentctl --socket "$folder/$1/agentd.sock" "${@:2}"; }
untrue() { printf 'this is not so: %s\n' "$*" >&2; exit 1; }

# holds EXPRESSION COMMAND…: whether the expression is true of `it`, the command's answer in JSON
holds() {
  "${@:2}" -o json |
    python3 -c 'import json, sys; sys.exit(not eval(f"({sys.argv[1]})", {"it": json.load(sys.stdin)}))' "$1"
}
sure() { holds "$@" || untrue "$1 of ${*:2}"; }
soon() {
  for _ in $(seq 50); do
    holds "$@" 2>/dev/null && return 0
    sleep 0.1
  done
  untrue "$1 of ${*:2}, after 5 seconds or more"
}

# refused WORDS COMMAND…: the command is refused, in these words among others (a basic regular expression)
refused() {
  local why
  shown "${@:2}"
  if why=$("${@:2}" 2>&1); then untrue "${*:2} is refused"; fi
  printf '%s\n' "$why"
  grep -q -- "$1" <<<"$why" || untrue "the refusal says $1"
}

# configure NODE PLUGINS
configure() {
  mkdir -p "$folder/$1"
  cat >"$folder/$1/agent.toml" <<TOML
[node]
id = "$1"
state-dir = "$folder/$1/state"
runtime = "process"
[rpc]
socket = "$folder/$1/agentd.sock"
[host]
cpus = 8
mem = "8g"
[plugins]
allow = ["sim"]
$2
TOML
}

# In a session of their own, daemons do not hear Ctrl-C, and still answer when kernels are removed.
start() {
  AGENTD_RUN_DIR="$folder/$1/run" setsid agentd run --config "$folder/$1/agent.toml" 2>>"$folder/$1/log" &
  daemons[$1]=$!
}

ready() {
  local end=$((SECONDS + 30))
  while [ "$SECONDS" -lt "$end" ]; do
    node "$1" status >/dev/null 2>&1 && return 0 # in a trap, return alone has the status from before it
    kill -0 "${daemons[$1]}" 2>/dev/null || break
    sleep 0.1
  done
  cat "$folder/$1/log" >&2
  return 1
}

stop() {
  kill "$1" 2>/dev/null || true
  wait "$1" 2>/dev/null || true
}

# Kernels outlive their daemons, so none may be left: the gateway first, that nobody creates any more.
finish() {
  local status=$? name left is_clean=1
  trap '' INT TERM HUP
  set +e
  [ -z "$gateway" ] || stop "$gateway"
  for name in "${!daemons[@]}"; do
    kill -0 "${daemons[$name]}" 2>/dev/null || start "$name"
    if ! ready "$name"; then
      echo "$name does not answer: its kernels may still run, and $folder is left as it is" >&2
      is_clean=""
      continue
    fi
    for _ in $(seq 20); do
      left=$(node "$name" ls -o name) || break
      [ -n "$left" ] || break
      node "$name" rm --timeout 0 $left >/dev/null 2>&1
    done
    stop "${daemons[$name]}"
  done
  [ -z "$is_clean" ] || rm -rf "$folder"
  exit "$status"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

say "three nodes with different plugins, started side by side, and a gateway that follows them"
configure "${nodes[0]}" $'[plugins.cuda]  # four whole devices\nplugin = "sim"\ncount = 4'
configure "${nodes[1]}" $'[plugins.rocm]\nplugin = "sim"\ncount = 2\n[plugins.npu]  # in hundredths\nplugin = "sim"\ncount = 2\nmode = "shares"'
configure "${nodes[2]}" $'[plugins.tpu]\nplugin = "sim"\ncount = 4'
cat >"$folder/fleet.toml" <<TOML
[fleet]
nodes = [
  "unix:$folder/${nodes[0]}/agentd.sock",
  "unix:$folder/${nodes[1]}/agentd.sock",
  "unix:$folder/${nodes[2]}/agentd.sock",
]
[gateway]
socket = "$folder/gateway.sock"
state-dir = "$folder/gateway"
TOML
run cat "$folder/fleet.toml"
for name in "${nodes[@]}"; do start "$name"; done
for name in "${nodes[@]}"; do ready "$name"; done
shown agentd-fleet gateway --config "$folder/fleet.toml"
setsid agentd-fleet gateway --config "$folder/fleet.toml" 2>"$folder/gateway.log" &
gateway=$!
shown export "AGENTCTL_FLEET=$AGENTCTL_FLEET"
soon 'len(it) == 3 and all(node["state"] == "ready" for node in it)' agentctl fleet nodes
run agentctl fleet nodes

say "one list of slots for all of them, with sums; a slot that a node does not have is zero there"
run agentctl fleet slots
sure '{row["name"]: row["capacity"] for row in it} == {"cpu": "24", "mem": str(24 << 30), "cuda.device": "4",
  "rocm.device": "2", "npu.shares": "2", "tpu.device": "4"}' agentctl fleet slots

say "a kernel goes where its slots are; whoever wants to, has nodes filled up one after the other"
run agentctl create --id trainer -s cuda.device=2 -s cpu=5 -- \
  sh -c 'echo "my GPUs: $CUDA_VISIBLE_DEVICES"; exec sleep 1000'
run agentctl create --id sharer -s npu.shares=0.25 -- sleep 1000
run agentctl create --id tuner -s tpu.device=4 -s rocm.device=0 -- sleep 1000
run agentctl create --id packed-1 --policy pack -s cpu=1 -- sleep 1000
run agentctl create --id packed-2 --policy pack -s cpu=1 -- sleep 1000
run agentctl logs trainer
a="${nodes[0]}" b="${nodes[1]}" c="${nodes[2]}"
sure "{kernel['kernel_id']: kernel['node_id'] for kernel in it} == {'trainer': '$a', 'sharer': '$b', 'tuner': '$c',
  'packed-1': '$a', 'packed-2': '$a'}" agentctl ls
soon '{row["name"]: row["free"] for row in it}.items() >= {"cuda.device": "2", "rocm.device": "2",
  "npu.shares": "1.75", "tpu.device": "0"}.items()' agentctl fleet slots
run agentctl fleet slots

say "a slot that no node ever had is refused before any node is asked"
calls() { cat "$folder"/*/log | grep -c rpc.call; }
before=$(calls)
refused 'qpu.device' agentctl create --id strange -s qpu.device=1 -- sleep 1000
[ "$(calls)" = "$before" ] || untrue "no node was asked"
echo "calls in the logs of the nodes: $before before, $(calls) after"

say "what nobody has enough of is refused by class"
refused 'lack cuda.device.*too small for cuda.device' agentctl create -s cuda.device=5 -- sleep 1000
refused 'full' agentctl create -s cuda.device=3 -- sleep 1000

say "one daemon is killed: its kernel is unknown, and created nowhere else; its slots stay known"
pid=$(node "$a" ls -o json | python3 -c 'import json, sys; print({k["kernel_id"]: k["pid"] for k in json.load(sys.stdin)}["trainer"])')
shown kill -KILL "${daemons[$a]}"
kill -KILL "${daemons[$a]}"
wait "${daemons[$a]}" 2>/dev/null || true
soon "{node['id']: node['state'] for node in it} == {'$a': 'daemon-down', '$b': 'ready', '$c': 'ready'}" agentctl fleet nodes
run agentctl fleet nodes
run agentctl ls
sure '{kernel["kernel_id"]: kernel["state"] for kernel in it}["trainer"] == "unknown"' agentctl ls
refused "$a" agentctl create --id trainer -s cuda.device=2 -s cpu=5 -- \
  sh -c 'echo "my GPUs: $CUDA_VISIBLE_DEVICES"; exec sleep 1000'
refused 'daemon-down' agentctl create -s cuda.device=1 -- sleep 1000
sure '"cuda.device" in {row["name"] for row in it}' agentctl fleet slots
for name in "$b" "$c"; do sure '"trainer" not in {kernel["kernel_id"] for kernel in it}' node "$name" ls; done
[ -d "/proc/$pid" ] || untrue "process $pid, the kernel, runs on without its daemon"

say "its daemon is back: the same kernel with the same process, listed with its node"
shown agentd run --config "$folder/$a/agent.toml"
start "$a"
ready "$a"
soon 'all(node["state"] == "ready" for node in it)' agentctl fleet nodes
run agentctl ls
sure "[(kernel['node_id'], kernel['state'], kernel['pid']) for kernel in it if kernel['kernel_id'] == 'trainer'] ==
  [('$a', 'running', $pid)]" agentctl ls
echo "trainer is process $pid, as before"

say "clean up"
run agentctl rm --timeout 0 "${kernels[@]}"
run agentctl ls
sure 'it == []' agentctl ls
for name in "${nodes[@]}"; do sure 'it == []' node "$name" ls; done
say "shown in $((SECONDS - began)) seconds"
