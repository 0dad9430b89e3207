"""Building the vendors' libraries that tests put in place of the real ones."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_built: dict[str, Path] = {}


def nvml_library(factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 that does what the file in FAKE_NVML_FILE says."""
    if "nvml" not in _built:
        if shutil.which("gcc") is None:
            if os.environ.get("AGENTD_REQUIRE_ALL"):
                pytest.fail("gcc is not installed")
            pytest.skip("gcc is not installed")
        folder = factory.mktemp("nvml")
        source = Path(__file__).parent / "nvml.c"
        target = folder / "libnvidia-ml.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, source, "-lpthread"], check=True)
        _built["nvml"] = folder
    return _built["nvml"]
