"""systemd accepts the unit files that are shipped."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.needs import require

ROOT = Path(__file__).parents[1]
UNITS = {
    "agentd": (
        "Type=notify",
        "KillMode=mixed",
        "RestartPreventExitStatus=78",
        "StartLimitBurst=",
        "StartLimitIntervalSec=",
        "SyslogIdentifier=agentd",
        "WatchdogSec=",
    ),
    "agentd-fleet-join": (
        "Type=notify",
        "RestartPreventExitStatus=78",
        "Wants=agentd.service",
        "ExecReload=/bin/kill -HUP $MAINPID",
    ),
    "agentd-slurm": ("Type=notify", "Wants=agentd.service munge.service"),
    "agentd-fleet-gateway": ("Type=notify", "RestartPreventExitStatus=78", "WatchdogSec=60"),
}
"""Some required lines of each unit file."""
EXPOSED = 40
"""Tenths of systemd's own points that a unit may have."""
INSTALLED = "agentd is not executable: No such file or directory"
"""A message about a program that only the package has; tests/node verifies with that installed."""


def analyzed(*arguments: str, unit: str) -> subprocess.CompletedProcess[str]:
    require("systemd-analyze")
    command = ["systemd-analyze", *arguments, ROOT / "systemd" / f"{unit}.service"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_unit_file_is_checked() -> None:
    assert {path.stem for path in ROOT.glob("systemd/*.service")} == UNITS.keys()


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit_file(unit: str) -> None:
    done = analyzed("verify", "--man=no", unit=unit)
    said = [line for line in done.stderr.splitlines() if INSTALLED not in line]
    assert (done.stdout, said) == ("", [])
    lines = (ROOT / "systemd" / f"{unit}.service").read_text().splitlines()
    for wanted in UNITS[unit]:
        assert any(line.startswith(wanted) for line in lines), wanted


def test_slurmd_starts_after_agentd(tmp_path: Path) -> None:
    require("systemd-analyze")
    shutil.copytree(ROOT / "systemd", tmp_path, dirs_exist_ok=True)
    slurmd = tmp_path / "slurmd.service"
    slurmd.write_text("[Unit]\nBefore=agentd.service\n[Service]\nExecStart=/bin/true\n")
    command = ["systemd-analyze", "verify", "--man=no", slurmd]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ordering cycle" in done.stderr, "the drop-in orders them the other way round"
    slurmd.write_text("[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if INSTALLED not in line] == []


@pytest.mark.parametrize("unit", UNITS)
def test_unit_has_few_unneeded_privileges(unit: str) -> None:
    done = analyzed("security", "--offline=true", f"--threshold={EXPOSED}", unit=unit)
    assert done.returncode == 0, done.stdout[-200:]
