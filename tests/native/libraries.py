"""Building the libraries that tests put in place of the vendors', and programs for kernels."""

import subprocess
from pathlib import Path

import pytest

from support.needs import require

SOURCES = Path(__file__).parent


def built(source: str, target: Path) -> Path:
    """Compile a C file beside this one into a program or a library (`*.so*`) at `target`."""
    require("gcc")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shared = ["-shared", "-fPIC"] if ".so" in target.name else []
        command = ["gcc", *shared, "-o", target, SOURCES / source, "-lpthread", "-ldl"]
        subprocess.run(command, check=True)
    return target


def nvml_library(factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 that does what the file in FAKE_NVML_FILE says."""
    return built("nvml.c", factory.getbasetemp() / "nvml" / "libnvidia-ml.so.1").parent


def amdsmi_library(factory: pytest.TempPathFactory) -> Path:
    """A libamd_smi.so that does what the file in FAKE_AMDSMI_FILE says."""
    return built("amdsmi.c", factory.getbasetemp() / "rocm" / "lib" / "libamd_smi.so")
