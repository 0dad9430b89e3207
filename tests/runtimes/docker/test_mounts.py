"""Mounts seen from inside a container that may end while it is looked at."""

import os
import subprocess
from pathlib import Path

import pytest

from agentd.core.kernel.edits import Mount
from agentd.errors import RuntimeFailure
from agentd.runtimes.docker import mounts
from agentd.runtimes.docker.mounts import MountSource, verify_mounts


def test_mounts_of_an_ending_process_are_gone() -> None:
    """A zombie has no namespace any more: reading its mountinfo is EINVAL, not ENOENT."""
    zombie = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(OSError, match="Invalid argument"):
            Path(f"/proc/{zombie.pid}/mountinfo").read_bytes()
        with pytest.raises(ProcessLookupError):
            verify_mounts(zombie.pid, [Mount("/tmp", "/tmp")], [MountSource("/tmp", 1, 1)])
    finally:
        zombie.wait()


def test_process_that_ends_while_its_mounts_are_read_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It did not replace them: a mount that is missing is a fault of a living process alone."""
    wanted = [Mount("/tmp", "/tmp")], [MountSource("/tmp", 1, 1)]
    monkeypatch.setattr(mounts, "_read_mount_points", lambda _: iter(()))
    zombie = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises((FileNotFoundError, ProcessLookupError)):
            verify_mounts(zombie.pid, *wanted)
    finally:
        zombie.wait()
    with pytest.raises(RuntimeFailure, match="/tmp was replaced during the create"):
        verify_mounts(os.getpid(), *wanted)
