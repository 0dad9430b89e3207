"""`agentctl claim`: the process of its command."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import Daemon

AGENTCTL = Path(sys.executable).parent / "agentctl"


@pytest.mark.parametrize(
    ("trap", "ignored"),
    [("", set()), ("trap '' HUP;", {signal.SIGHUP}), ("trap '' INT QUIT;", {2, 3})],
)
async def test_command_ignores_the_signals_of_the_caller(
    up: Daemon, trap: str, ignored: set[int]
) -> None:
    socket = str(up.folder / "agentd.sock")
    words = [
        "--socket",
        socket,
        "claim",
        "agent-1",
        "-s",
        "cuda.device=1",
        "cat",
        "/proc/self/status",
    ]
    script = ["sh", "-c", f'{trap} exec "$@"', "sh", str(AGENTCTL), *words]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    mask = int(re.findall(r"SigIgn:\s+(\w+)", done.stdout)[0], 16)
    usual = range(1, signal.SIGSYS + 1)  # the next two are glibc's own, see nptl(7)
    assert {number for number in usual if mask >> (number - 1) & 1} == ignored
