"""Modes of what agentd makes, whatever the umask is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentd.host.cgroups.hierarchies import find_cgroups
from support.daemon import BASE, Daemon

WRITABLE = 0o022
AGENTD = "from agentd.cli.agentd.main import agentd; agentd()"
AGENTCTL = "from agentd.cli.agentctl.main import agentctl; agentctl()"


def writable_by_others(folder: Path) -> list[Path]:
    paths = [path for path in folder.rglob("*") if not path.is_symlink() and not path.is_socket()]
    return [path for path in paths if path.lstat().st_mode & WRITABLE]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (AGENTD, ["config", "init", "{}/a/b/agent.toml"]),
        (AGENTCTL, ["token", "create", "ann", "--role", "read", "--file", "{}/a/b/ann"]),
    ],
    ids=["config", "token"],
)
def test_commands_make_no_folder_that_others_can_write(
    tmp_path: Path, program: str, words: list[str]
) -> None:
    command = [sys.executable, "-c", program, *(word.format(tmp_path) for word in words)]
    subprocess.run(command, umask=0, check=True, capture_output=True, timeout=60)
    assert len([*tmp_path.rglob("*")]) == 3
    assert writable_by_others(tmp_path) == []


@pytest.mark.parametrize("umask", [0, 0o077], ids=["open", "hardened"])
async def test_a_daemon_makes_no_folder_that_others_can_write(folder: Path, umask: int) -> None:
    daemon = Daemon(folder, "process")
    daemon.program = ("-m", "agentd")
    base = BASE.replace("{folder}/state", "{folder}/made/a/state")
    daemon.configure(base=base.replace("{folder}/agentd.sock", "{folder}/made/b/agentd.sock"))
    before = os.umask(umask)
    try:
        await daemon.start()
    finally:
        os.umask(before)
    try:
        (folder / "agentd.sock").symlink_to(folder / "made/b/agentd.sock")
        await daemon.running(kernel_id="k1")
        assert writable_by_others(folder / "made") == []
        if (cgroups := find_cgroups()) is not None:
            groups = cgroups.group(f"agentd-{daemon.node}-k1").folders
            assert [g for g in groups if g.exists() and g.stat().st_mode & WRITABLE] == []
    finally:
        await daemon.close()
