"""The Slurm engine's commands end and go on as if their log were read."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EPILOG = """
from agentd_slurm.commands.epilog import main
from agentd_slurm.node_client import NodeClient
NodeClient.__init__.__defaults__ = (0.0,)
main()
"""
COMMAND = """
from agentd_slurm.cli import agentd_slurm
from agentd_slurm.commands import sync
from agentd_slurm.node_client import NodeClient
NodeClient.__init__.__defaults__ = (0.0,)
sync.EVERY_S = 0.1
agentd_slurm()
"""


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def start(folder: Path, stderr: int, *words: str, **environ: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "AGENTD_SOCKET": str(folder / "none.sock"), "PATH": "/none", **environ}
    return subprocess.Popen([sys.executable, "-c", COMMAND, *words], stderr=stderr, env=env)


def test_sync_goes_on_without_a_reader_of_its_log(tmp_path: Path, unread: int) -> None:
    notify = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(notify)
        manager.settimeout(30)
        process = start(tmp_path, unread, "sync", "--node", "n1", NOTIFY_SOCKET=notify)
        try:
            statuses = [manager.recv(4096).decode() for _ in range(3)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
    assert statuses[0] == "READY=1\nSTATUS=starting"
    assert all("none.sock" in status for status in statuses[1:]), statuses


def test_epilog_leaves_its_job_to_sync_without_a_reader(tmp_path: Path, unread: int) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1", "AGENTD_SOCKET": str(tmp_path / "none")}
    command, env = [sys.executable, "-c", EPILOG], {**os.environ, **job}
    done = subprocess.run(command, stderr=unread, env=env, timeout=30, check=False)
    assert done.returncode == 0, "Slurm drains a node whose epilog fails"


def test_sync_says_how_many_lines_were_lost(capsys: pytest.CaptureFixture[str]) -> None:
    from agentd.stderr import LostLines
    from agentd_slurm.commands import job_environment

    lost = LostLines()
    lost.add(3, "Broken pipe")
    lost.mark_writable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_environment, "LOST", lost)
        job_environment.log_line("sync", "in step")
    assert capsys.readouterr().err.splitlines() == [
        "agentd-slurm sync: in step",
        "agentd-slurm sync: lines lost from this log: 3 (Broken pipe)",
    ]
