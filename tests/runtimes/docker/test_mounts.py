"""Mounts seen from inside a container that may end while it is looked at."""

import os
import subprocess

import pytest

from agentd.core.kernel.edits import Mount
from agentd.errors import RuntimeFailure
from agentd.runtimes.docker import mounts
from agentd.runtimes.docker.mounts import MountSource, verify_mounts


@pytest.mark.parametrize("is_read_before", [False, True])
def test_mounts_of_an_ending_process_are_gone(
    monkeypatch: pytest.MonkeyPatch, is_read_before: bool
) -> None:
    """It did not replace them: a missing mount is a fault of a living process alone.

    A zombie has no namespace any more: reading its mountinfo is EINVAL, not ENOENT.
    """
    wanted = [Mount("/tmp", "/tmp")], [MountSource("/tmp", 1, 1)]
    if is_read_before:
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
