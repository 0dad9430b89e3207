#!/usr/bin/env bash
# The real GPUs of this machine, tried through a real daemon; writes docs/contributing/hardware/DATE-GPU.md.
# Fails where there is no GPU: nothing was shown then. IMAGE names one with the probe's needs, to try
# containers too; OUT is another folder for the record.
set -uo pipefail
cd "$(dirname "$0")/../.."
bin=$(dirname "${PYTHON_BIN:-$PWD/.venv/bin/python}")
out=${OUT:-docs/contributing/hardware}
mkdir -p "$out" && [ -w "$out" ] || { echo "$out cannot be written: nothing was tried" >&2; exit 1; }
work=$(mktemp -d)
chmod 755 "$work"
mps_stop() { [ -d "$work/pipe" ] && echo quit | CUDA_MPS_PIPE_DIRECTORY="$work/pipe" nvidia-cuda-mps-control; }
daemon=
trap 'mps_stop 2>/dev/null; [ -z "$daemon" ] || kill "$daemon" 2>/dev/null; rm -rf "$work"' EXIT

if ! smi=$(nvidia-smi --query-gpu=name,driver_version,memory.total,compute_mode,mig.mode.current --format=csv,noheader); then
  echo "no NVIDIA GPU answers on this machine: nothing was tried" >&2
  exit 1
fi
gpu=$(echo "$smi" | head -n 1 | cut -d, -f1 | tr -cs 'A-Za-z0-9\n' '-' | sed 's/-$//')
record="$out/$(date -u +%Y-%m-%d)-$gpu.md"
probe=${PROBE:-"$bin/python $PWD/tests/hardware/cuda_probe.py"}
failed=0

# config NAME KEY=VALUE...: one node with the cuda plugin; kernels run as who runs this
config() {
  printf '[node]\nid = "hardware-%s-%s"\nruntime = "process"\n[runtime.process]\nuser = "%s"\n[plugins]\nallow = ["cuda"]\n[plugins.cuda]\nrequired = true\n' "$1" $$ "$(id -un)" >"$work/$1.toml"
  printf '%s\n' "${@:2}" >>"$work/$1.toml"
}
wrong() { failed=1; printf '\n**failed**: %s\n' "$1"; }
section() { printf '\n# %s\n\n' "$1"; }
checked() { # checked NAME: the whole report of one configuration
  timeout 120 "$bin/python" tests/hardware/hardware_check.py cuda --config "$work/$1.toml" --probe "$probe" ${IMAGE:+--image "$IMAGE"} ||
    wrong "see above"
}

# serve NAME: agentd with one configuration, for agentctl
serve() {
  export AGENTD_CONFIG="$work/$1.toml" AGENTD__NODE__STATE_DIR="$work/state-$1" AGENTD__RPC__SOCKET="$work/agentd.sock"
  "$bin/agentd" run 2>"$work/daemon" &
  daemon=$!
  for _ in $(seq 300); do
    [ -S "$work/agentd.sock" ] && "$bin/agentctl" status >/dev/null 2>&1 && break
    kill -0 "$daemon" 2>/dev/null || { wrong "agentd does not start"; break; }
    sleep 0.1
  done
}
unserve() {
  kill "$daemon"
  wait "$daemon" || { wrong "agentd failed"; cat "$work/daemon" >&2; }
  daemon=
  unset AGENTD_CONFIG AGENTD__NODE__STATE_DIR AGENTD__RPC__SOCKET
}

# claims: a claim of every GPU, a second one, and a program that claims nothing
claims() {
  local stranger said count
  count=$(echo "$smi" | wc -l)
  serve device
  echo "A program under \`agentctl claim\`:"
  echo
  "$bin/agentctl" claim main -s "cuda.device=$count" -- sh -c "$probe" | sed 's/^/    /' || wrong "no claim was given"
  "$bin/agentctl" claim main -s "cuda.device=$count" -- sleep 1000 &
  stranger=$!
  for _ in $(seq 100); do
    [ "$("$bin/agentctl" claims -o name | wc -l)" = 1 ] && break
    kill -0 "$stranger" 2>/dev/null || break
    sleep 0.1
  done
  if said=$("$bin/agentctl" claim main -s cuda.device=1 -- true 2>&1); then wrong "a GPU was given twice"; fi
  printf '\nA second claim, while a program holds every GPU:\n\n    %s\n' "$said"
  kill "$stranger"
  wait "$stranger" 2>/dev/null
  for _ in $(seq 100); do
    [ "$("$bin/agentctl" claims -o name | wc -l)" = 0 ] && break
    sleep 0.01
  done
  [ "$("$bin/agentctl" claims -o name | wc -l)" = 0 ] || wrong "a claim outlives its program"
  HOLD=30 sh -c "$probe" >/dev/null &
  stranger=$!
  for _ in $(seq 25); do
    said=$("$bin/agentctl" status | grep "without a claim") && break
    kill -0 "$stranger" 2>/dev/null || break
    sleep 1
  done
  kill "$stranger" 2>/dev/null
  wait "$stranger" 2>/dev/null
  printf '\nA program that uses a GPU without a claim, as `agentctl status` shows it:\n\n    %s\n' "${said:-(nothing)}"
  [ -n "$said" ] || wrong "it was not seen"
  unserve
}

# limits: what kernels get of a quarter, and of 4 GiB, through MPS
limits() {
  serve mps-memory
  local quarter="$bin/agentctl run main --rm -s cuda.shares=0.25 -s cuda.mem=4g --"
  printf 'A kernel with a quarter of a GPU and 4 GiB of its memory:\n\n'
  $quarter sh -c "$probe" | sed 's/^/    /' || wrong "it failed"
  printf '\nThe same, where the program allocates 6 GiB:\n\n'
  $quarter sh -c "TAKE_MIB=6144 $probe" | sed 's/^/    /' | tee "$work/taken"
  grep -q "6144 MiB: error 2" "$work/taken" || wrong "nothing limits its memory"
  unserve
}

config device 'mode = "device"'
config shares 'mode = "shares"'
config memory 'mode = "shares"' 'memory-slot = true'
{
  section "The machine"
  printf '```\n%s\n```\n' "$smi"
  printf '\nagentd at commit %s.\n' "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  section "Whole GPUs"
  checked device
  section "Shares"
  checked shares
  section "Shares and memory"
  checked memory
  section "Claims"
  claims
  section "Shares through MPS"
  if command -v nvidia-cuda-mps-control >/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY="$work/pipe" CUDA_MPS_LOG_DIRECTORY="$work/log"
    mkdir "$work/pipe" "$work/log"
    nvidia-cuda-mps-control -d
    config mps 'mode = "shares"' 'share-control = "mps"' "mps-pipe-directory = \"$work/pipe\""
    checked mps
    section "Shares and memory through MPS"
    config mps-memory 'mode = "shares"' 'memory-slot = true' 'share-control = "mps"' "mps-pipe-directory = \"$work/pipe\""
    checked mps-memory
    section "A quarter of a GPU, through MPS"
    limits
  else
    echo "Not tried: nvidia-cuda-mps-control is not installed here."
  fi
} >"$record.new" 2>"$work/stderr"
cat "$work/stderr" >&2
mv "$record.new" "$record"
cat "$record"
exit $failed
