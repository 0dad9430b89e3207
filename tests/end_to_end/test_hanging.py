"""Names that nobody looks up hold up nothing else; an exec ends with a daemon that hangs."""

import array
import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from native.libraries import built
from support import fork_server
from support.daemon import AGENTS, Daemon
from support.waiting import until

ACCOUNTS = '[[agents]]\nid = "agent-1"\n[[agents]]\nid = "agent-2"\nuser = "daemon"\n'
SLEEPER = ["sleep", "100000"]
MOST_S = 20
FULL = 1 << 15
"""Bytes in a pipe whose reader is away, of the 64 KiB that it holds (pipe(7))."""


@contextlib.contextmanager
def hanging(folder: Path) -> Iterator[None]:
    """Hold up lookups of the user `daemon`."""
    file = folder / "daemon"
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@pytest.mark.needs("root", "gcc")
async def test_users_that_nobody_answers_for_hold_up_no_thread(
    plain: Daemon, tmp_path: Path
) -> None:
    names = {"LD_PRELOAD": str(built("silent.c", tmp_path / "silent.so"))}
    await plain.start(ACCOUNTS, **names, HANGING=str(plain.folder))
    await plain.running(kernel_id="k1")
    with hanging(plain.folder):
        for _ in range(12):
            assert (await plain.call("POST", "/v1/reload")).json == {"needs_restart": []}
        why = "agents.1.user: user 'daemon' cannot be looked up: the name service does not answer"
        silent, condition = (await plain.get("/v1/node"))["conditions"]
        assert (silent["about"], silent["reason"]) == ("host", "user 'daemon' does not answer")
        assert (condition["about"], condition["reason"]) == ("agent/agent-2", why)
        await plain.running("agent-2")  # its user was known
        async with asyncio.timeout(MOST_S):
            await plain.running(kernel_id="k2")
            command = ["--socket", str(plain.folder / "agentd.sock"), "exec", "k2", "echo", "in"]
            done = await asyncio.to_thread(fork_server.run, "agentctl", *command)
            assert (done.returncode, done.stdout) == (0, "in\n")
            assert (await plain.call("GET", "/v1/stats")).status == 200
            assert (await plain.call("GET", "/metrics")).status == 200
            assert await plain.get("/v1/node?check=true")
            for kernel_id in ("k1", "k2"):
                stopped = await plain.call("POST", f"/v1/kernels/{kernel_id}/stop", {"timeout": 0})
                assert stopped.status == 200
    await plain.call("POST", "/v1/reload")
    assert await plain.warnings() == []


class Exec:
    """agentctl exec of a command in k1."""

    def __init__(self, daemon: Daemon, *command: str) -> None:
        words = ["--socket", str(daemon.folder / "agentd.sock"), "exec", "k1", "--", *command]
        self._out, writer = os.pipe()
        self.process = fork_server.spawn(
            *("agentctl", words, os.environ), stdout=writer, stderr=writer,
            deadlines={"agentd.cli.agentctl.exec.RESPONSE_TIMEOUT_S": 1.5},
        )  # fmt: skip
        os.close(writer)

    async def printed(self) -> bytes:
        return await asyncio.to_thread(os.read, self._out, 4096)

    def unread(self) -> int:
        """Return the bytes in the pipe."""
        size = array.array("i", [0])
        fcntl.ioctl(self._out, termios.FIONREAD, size)
        return size[0]

    async def ended(self) -> int:
        status = await asyncio.to_thread(self.process.wait, MOST_S)
        os.close(self._out)
        return status


@pytest.fixture
async def daemon(plain: Daemon) -> Daemon:
    await plain.start(AGENTS)
    await plain.running(kernel_id="k1", command=SLEEPER)
    return plain


async def assert_ends_while_hanging(daemon: Daemon, running: Exec, name: str) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    number = signal.Signals[f"SIG{name}"]
    try:
        running.process.send_signal(number)
        assert await running.ended() == 128 + number
    finally:
        daemon.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("name", ["INT", "TERM"])
async def test_exec_ends_while_its_daemon_hangs(daemon: Daemon, name: str) -> None:
    running = Exec(daemon, "sh", "-c", "echo ready; sleep 1000")
    assert await running.printed() == b"ready\n"
    await assert_ends_while_hanging(daemon, running, name)


@pytest.mark.parametrize("name", ["INT", "TERM"])
async def test_exec_without_a_reader_ends_while_its_daemon_hangs(daemon: Daemon, name: str) -> None:
    running = Exec(daemon, "sh", "-c", "yes")
    await until(running.unread, lambda size: size >= FULL)
    await assert_ends_while_hanging(daemon, running, name)


@pytest.mark.parametrize("name", ["INT", "TERM"])
async def test_exec_ends_before_a_hanging_daemon_answers(daemon: Daemon, name: str) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    words = ["--socket", str(daemon.folder / "agentd.sock"), "exec", "k1", "true"]
    agentctl = Path(sys.executable).with_name("agentctl")
    try:
        with subprocess.Popen([agentctl, *words], stderr=subprocess.DEVNULL) as process:
            await until(lambda: connected(process.pid), within_s=MOST_S)
            process.send_signal(signal.Signals[f"SIG{name}"])
            assert await asyncio.to_thread(process.wait, MOST_S) in (130, 143)
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def connected(pid: int) -> bool:
    """Return whether a process has a socket."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    return any(link.startswith("socket:") for link in links)


async def test_exec_waits_for_a_silent_command_after_a_signal(daemon: Daemon) -> None:
    script = "trap 'sleep 3; exit 5' INT; echo ready; while :; do sleep 0.05; done"
    running = Exec(daemon, "sh", "-c", script)
    assert await running.printed() == b"ready\n"
    running.process.send_signal(signal.SIGINT)
    assert await running.ended() == 5
