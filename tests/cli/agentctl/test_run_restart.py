"""`agentctl run` on a real node: restarts in the middle, and the keys and the end of a terminal."""

import asyncio
import os
import pty
import signal
import subprocess

import pytest

from support.daemon import AGENTS, Daemon
from support.scripted_node import BIN, Agentctl
from support.waiting import until

LINES = 60_000
SMALL_LOGS = '[runtime.process]\nlog-max-size = "128k"\nlog-max-files = 10\n'


async def test_output_is_whole_after_restarts_of_the_daemon(up: Daemon) -> None:
    """The log is rotated meanwhile, and the kernel writes while no daemon runs."""
    await up.restart(AGENTS + SMALL_LOGS)
    os.mkfifo(up.folder / "go")
    script = f"seq {LINES}; read line < {up.folder}/go; seq {LINES}; exit 3"
    running = Agentctl(up.folder, "run", "agent-1", "--rm", "--", "sh", "-c", script)
    await until(lambda: running.stdout.count("\n") > LINES // 2)
    await up.stop(signal.SIGKILL)
    (up.folder / "go").write_text("\n")
    await up.start()
    await until(lambda: running.stdout.count("\n") > LINES)
    await up.restart()
    done = await running.done()
    numbers = "".join(f"{number}\n" for number in range(1, LINES + 1))
    assert (done.status, done.stdout == numbers * 2) == (3, True), done.stderr
    assert await up.get("/v1/kernels") == []


class OnTerminal:
    """`agentctl run` as the session leader of a terminal of its own."""

    def __init__(self, up: Daemon, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        words = ("--socket", up.folder / "agentd.sock", "run", "agent-1", "--rm", "--", *command)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", BIN / "agentctl", *words],
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)

    async def until_shown(self, text: bytes) -> None:
        shown = b""
        async with asyncio.timeout(20):
            while text not in shown:
                shown += await asyncio.to_thread(os.read, self._ours, 65536)

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def hang_up(self) -> None:
        os.close(self._ours)

    async def end(self) -> int:
        return await asyncio.to_thread(self.process.wait, 40)


@pytest.mark.parametrize("script", ["", "trap 'exit 4' HUP;"], ids=["sleep", "a trap"])
async def test_kernel_ends_with_the_window_of_its_run(up: Daemon, script: str) -> None:
    """https://github.com/podman-container-tools/podman/issues/20003"""
    script = f"{script} echo ready; while :; do sleep 0.05; done"
    running = OnTerminal(up, "sh", "-c", script)
    await running.until_shown(b"ready")
    running.hang_up()
    assert await running.end() == (4 if "trap" in script else 128 + signal.SIGHUP)
    assert await up.get("/v1/kernels") == []


async def test_second_key_ends_a_kernel_that_ignores_the_first(up: Daemon) -> None:
    """https://github.com/kubernetes/kubectl/issues/1445"""
    script = "trap 'echo heard' INT; trap '' TERM; echo ready; while :; do sleep 0.05; done"
    running = OnTerminal(up, "sh", "-c", script)
    await running.until_shown(b"ready")
    running.press(b"\x03")
    await running.until_shown(b"heard")
    running.press(b"\x03")
    assert await running.end() == 128 + signal.SIGKILL
    running.hang_up()
    assert await up.get("/v1/kernels") == []
