#!/usr/bin/env bash
# agentd in a minute: no Docker, no GPU, nothing outside a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=$(mktemp -d /tmp/agentd-demo-XXXXXX)
chmod 755 "$folder"
export AGENTD_CONFIG=configs/dev.toml
export AGENTD__NODE__ID=${folder##*/}
export AGENTD__NODE__STATE_DIR=$folder/state
export AGENTD__RPC__SOCKET=$folder/agentd.sock
daemon=""

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
refused() { shown "$@"; if "$@"; then echo "this should have been refused" >&2; exit 1; fi; }

start() {
  agentd run 2>>"$folder/log" &
  daemon=$!
  for _ in $(seq 100); do
    agentctl status >/dev/null 2>&1 && return
    kill -0 "$daemon" 2>/dev/null || break
    sleep 0.1
  done
  cat "$folder/log" >&2
  exit 1
}

finish() {
  if [ -n "$daemon" ] && kill -0 "$daemon" 2>/dev/null; then
    agentctl rm --timeout 0 trainer notebook batch >/dev/null 2>&1 || true
    kill "$daemon" 2>/dev/null && wait "$daemon" || true
  fi
  rm -rf "$folder"
}
trap finish EXIT

say "the partition that configs/dev.toml asks for: five GPUs and two NPUs for two agents"
run agentd plan

say "start the daemon"
start
run agentctl status

say "kernels on both agents"
run agentctl create agent-1 --id trainer -s cuda.device=2 -s cpu=2 -s mem=512m -- \
  sh -c 'echo "my GPUs: $CUDA_VISIBLE_DEVICES"; exec sleep 1000'
run agentctl create agent-2 --id notebook -s cuda.device=1 -- sleep 1000
run agentctl create agent-2 --id batch -s npu.shares=0.25 -- sleep 1000
run agentctl logs trainer

say "a slot that this node does not know is refused, and so is one that is used up"
refused agentctl create agent-1 -s tpu.chip=1 -- sleep 1000
refused agentctl create agent-1 -s cuda.device=2 -- sleep 1000

say "kill the daemon under its running kernels, and start it again"
before=$(agentctl ls --json | grep '"pid"')
kill -KILL "$daemon"
wait "$daemon" 2>/dev/null || true
start
run agentctl ls
after=$(agentctl ls --json | grep '"pid"')
[ "$before" = "$after" ] || { echo "the kernels are not the same ones" >&2; exit 1; }
echo "the same three kernels, with the same pids, on the same devices:"
run agentctl agents

say "clean up"
run agentctl rm --timeout 0 trainer notebook batch
run agentctl ls
