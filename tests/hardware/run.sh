#!/usr/bin/env bash
# The real GPUs of this machine, tried through a real daemon; writes docs/contributing/hardware/DATE-GPU.md.
# Fails where there is no GPU: nothing was shown then. IMAGE names one with the probe's needs, to try
# containers too; OUT is another folder for the record.
set -uo pipefail
cd "$(dirname "$0")/../.."
bin="$PWD/.venv/bin"
out=${OUT:-docs/contributing/hardware}
mkdir -p "$out" && [ -w "$out" ] || { echo "$out cannot be written: nothing was tried" >&2; exit 1; }
work=$(mktemp -d)
chmod 755 "$work"
mps_stop() { [ -d "$work/pipe" ] && echo quit | CUDA_MPS_PIPE_DIRECTORY="$work/pipe" nvidia-cuda-mps-control; }
trap 'mps_stop 2>/dev/null; rm -rf "$work"' EXIT

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
  printf '[node]\nid = "hardware-%s"\nruntime = "process"\n[runtime.process]\nuser = "%s"\n[plugins]\nallow = ["cuda"]\n[plugins.cuda]\nrequired = true\n' "$1" "$(id -un)" >"$work/$1.toml"
  printf '%s\n' "${@:2}" >>"$work/$1.toml"
}
section() { printf '\n# %s\n\n' "$1"; }
checked() { # checked NAME: the whole report of one configuration
  timeout 120 "$bin/agentd" plugin check cuda --config "$work/$1.toml" --hardware --probe "$probe" ${IMAGE:+--image "$IMAGE"} ||
    { failed=1; echo "**failed**"; }
}

config device 'mode = "device"'
config shares 'mode = "shares"'
{
  section "The machine"
  printf '```\n%s\n```\n' "$smi"
  printf '\nagentd at commit %s.\n' "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  section "Whole GPUs"
  checked device
  section "Shares"
  checked shares
  section "Shares through MPS"
  if command -v nvidia-cuda-mps-control >/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY="$work/pipe" CUDA_MPS_LOG_DIRECTORY="$work/log"
    mkdir "$work/pipe" "$work/log"
    nvidia-cuda-mps-control -d
    config mps 'mode = "shares"' 'share-control = "mps"' "mps-pipe-directory = \"$work/pipe\""
    checked mps
    section "What a quarter is, through MPS"
    timeout 60 env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 $probe | sed 's/^/    /' ||
      { failed=1; echo "**failed**"; }
  else
    echo "Not tried: nvidia-cuda-mps-control is not installed here."
  fi
} >"$record.new" 2>"$work/stderr"
cat "$work/stderr" >&2
mv "$record.new" "$record"
cat "$record"
exit $failed
