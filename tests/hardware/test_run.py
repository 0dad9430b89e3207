"""The script for real GPUs, with stand-ins: that it tries what it says, and fails where it must."""

import os
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest

from native.libraries import nvml_library

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/hardware/run.sh"
PROBE = """#!/bin/sh
if [ -z "$HOLD" ]; then test -n "$CUDA_VISIBLE_DEVICES"; exit; fi
cp "$FAKE_NVML_FILE" "$FAKE_NVML_FILE.new"
echo "proc gpu=0 mig=-1 pid=$$ mem=1" >>"$FAKE_NVML_FILE.new"
mv "$FAKE_NVML_FILE.new" "$FAKE_NVML_FILE"
exec sleep "$HOLD"
"""
"""A program that the stand-in lists as one that computes, while it holds the GPU."""
GPU = "driver 570.1\ninit 0\ngpu uuid=GPU-{uuid} pci={domain:08X}:3B:00.0 name=NVIDIA H100\n"

pytestmark = [pytest.mark.timeout(200), pytest.mark.long]


@pytest.fixture
def machine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine whose GPU is NVML's stand-in."""
    (folder / "bin").mkdir()
    (folder / "out").mkdir()
    smi = folder / "bin/nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 570.1, 81559 MiB, Default, Disabled'\n")
    smi.chmod(0o755)
    (folder / "gpus").write_text(
        GPU.format(uuid=folder.name, domain=crc32(folder.name.encode()) % 2**16)
    )
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHON_BIN": sys.executable,
        "OUT": str(folder / "out"),
        "AGENTD_RUN_DIR": str(folder / "run"),
        "LD_LIBRARY_PATH": str(nvml_library(tmp_path_factory)),
        "FAKE_NVML_FILE": str(folder / "gpus"),
    }


def run(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_without_a_gpu_it_fails_and_says_so(machine: dict[str, str]) -> None:
    result = run({**machine, "PATH": os.environ["PATH"]})
    assert result.returncode == 1
    assert "nothing was tried" in result.stderr


def test_run_records_its_findings(machine: dict[str, str], folder: Path) -> None:
    (folder / "probe").write_text(PROBE)
    result = run({**machine, "PROBE": f"sh {folder / 'probe'}"})
    assert result.returncode == 0, result.stdout + result.stderr
    record = next((folder / "out").glob("*-NVIDIA-H100.md")).read_text()
    for line in (
        f"GPU-{folder.name}",
        "| a kernel with cuda0 runs (process) | yes |",
        "| what a kernel without devices sees (process) | yes |",
        "requested 1, 0 free (1 in total)",
        "without a claim",
        "Not tried: nvidia-cuda-mps-control is not installed here.",
        'agentd_device_memory_total_bytes{device_name="cuda"',
    ):
        assert line in record


def test_run_needs_a_writable_record(machine: dict[str, str]) -> None:
    result = run({**machine, "OUT": "/proc/nowhere"})
    assert (result.returncode, "nothing was tried" in result.stderr) == (1, True)


def test_a_probe_that_fails_makes_it_fail(machine: dict[str, str], folder: Path) -> None:
    result = run({**machine, "PROBE": "false"})
    assert result.returncode == 1
    record = next((folder / "out").glob("*.md")).read_text()
    assert "| a kernel with cuda0 runs (process) | **no** |" in record
