"""`agentctl exec`: its statuses, the caller's signals and terminal, and streams that fail."""

import asyncio
import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from aiohttp import web

from support import fork_server
from support.daemon import Daemon
from support.waiting import until

AGENTCTL = str(Path(sys.executable).with_name("agentctl"))
ENDS_WITHIN_S = 40
TOLD = (
    "n=0; for s in HUP INT TERM QUIT USR1 USR2; do trap 'n=$((n + 1)); echo '$s' $n' $s; done;"
    " echo ready;"
)
"""Prints each signal, with the number of signals until then."""
THREE = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that arrive in this order, also if all are sent before the first is taken."""
NO_DEADLINES: Mapping[str, float] = MappingProxyType({})


@pytest.fixture
async def kernel(up: Daemon) -> Daemon:
    """A daemon with the kernel k1."""
    await up.running(kernel_id="k1", command=["sleep", "100000"])
    return up


def words_of(daemon: Daemon, *words: str) -> list[str]:
    return ["--socket", str(daemon.folder / "agentd.sock"), "exec", *words]


class Done(NamedTuple):
    """The end of a program."""

    status: int
    stdout: str
    stderr: str


async def run(daemon: Daemon, *words: str, text: str = "") -> Done:
    done = await asyncio.to_thread(
        fork_server.run, "agentctl", *words_of(daemon, *words), text=text
    )
    return Done(done.returncode, done.stdout, done.stderr)


async def in_shell(daemon: Daemon, script: str, **env: str) -> Done:
    """Run a script of bash in which $EXEC is agentctl exec."""
    command = " ".join([AGENTCTL, *words_of(daemon)])
    done = await asyncio.to_thread(
        lambda: subprocess.run(
            ["bash", "-c", script], env={**os.environ, "EXEC": command, **env},
            capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False,
        )
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


class Terminal:
    """`agentctl exec` on a terminal."""

    def __init__(self, words: Sequence[str], deadlines: Mapping[str, float]) -> None:
        self._master, self._slave = pty.openpty()
        self.mode_before = self.mode
        self.process = fork_server.spawn(
            "agentctl", words, os.environ,
            stdin=self._slave, stdout=self._slave, stderr=self._slave, deadlines=deadlines,
        )  # fmt: skip
        self.seen = b""

    @property
    def mode(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def hang_up(self) -> None:
        os.close(self._master)
        self._master = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        self.process.kill()
        os.close(self._master)
        os.close(self._slave)

    async def until(self, text: bytes) -> None:
        while text not in self.seen:
            await asyncio.to_thread(select.select, [self._master], [], [], ENDS_WITHIN_S)
            os.set_blocking(self._master, False)
            self.seen += os.read(self._master, 4096)

    async def status(self) -> int:
        return await asyncio.to_thread(self.process.wait, ENDS_WITHIN_S)


@contextlib.contextmanager
def on_terminal(
    daemon: Daemon, *words: str, deadlines: Mapping[str, float] = NO_DEADLINES
) -> Iterator[Terminal]:
    terminal = Terminal(words_of(daemon, *words), deadlines)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("k1 sh -c 'exit 1'", 1, ""),
        ("k1 sh -c 'exit 125'", 125, ""),
        ("k1 sh -c 'kill -9 $$'", 137, ""),
        ("k1 no-such-program", 127, "CommandNotFound: command 'no-such-program'"),
        ("k1 /etc/passwd", 126, "CommandNotFound: command '/etc/passwd'"),
        ("k1 /", 126, "CommandNotFound: command '/'"),
        ("k1 'x: permission denied'", 127, "CommandNotFound"),
        ("k2 true", 125, "UnknownKernel"),
        ("--env A k1 true", 2, "expected NAME=VALUE"),
        ("--workdir no-such k1 true", 125, "InvalidRequest"),
    ],
)
async def test_status_is_that_of_the_command_or_above_124(
    kernel: Daemon, words: str, status: int, told: str
) -> None:
    done = await in_shell(kernel, f"$EXEC {words}")
    assert (done.status, done.stdout, told in done.stderr) == (status, "", True), done


@pytest.mark.parametrize(
    "words",
    [
        ["--socket", "no-such.sock", "exec", "k1", "true"],
        ["--url", "http://127.0.0.1:1", "exec", "k1", "true"],
        ["--url", "http://127.0.0.1:1", "--token-file", "no-such", "exec", "k1", "true"],
        ["--config", "no-such.toml", "exec", "k1", "true"],
        ["--fleet", "unix:no-such.sock", "exec", "k1", "true"],
        ["fleet", "exec", "k1", "true"],
    ],
)
def test_exec_without_a_daemon_ends_with_125(words: Sequence[str]) -> None:
    done = fork_server.run("agentctl", *words, env={})
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.startswith("agentctl: ")


async def test_options_of_the_command_are_its_own(kernel: Daemon) -> None:
    done = await run(kernel, "k1", "grep", "-i", "FOO", text="foo\n")
    assert done == (1, "", "")
    assert await run(kernel, "k1", "-i", "grep", "-i", "FOO", text="foo\n") == (0, "foo\n", "")


@pytest.mark.parametrize("name", ["HUP", "INT", "TERM", "QUIT", "USR1", "USR2"])
async def test_signal_reaches_the_command_as_itself(kernel: Daemon, name: str) -> None:
    script = f"trap 'exit 9' {name}; echo ready; while :; do sleep 0.1; done"
    with on_terminal(kernel, "-it", "k1", "sh", "-c", script) as terminal:
        await terminal.until(b"ready")
        assert terminal.mode != terminal.mode_before
        terminal.process.send_signal(signal.Signals[f"SIG{name}"])
        assert await terminal.status() == 9
        assert terminal.mode == terminal.mode_before


@pytest.mark.parametrize("name", ["HUP", "INT", "TERM", "QUIT"])
async def test_third_signal_ends_exec_with_its_terminal_restored(kernel: Daemon, name: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    script = f"{TOLD} while :; do sleep 0.1; done"
    with on_terminal(kernel, "-it", "k1", "sh", "-c", script) as terminal:
        await terminal.until(b"ready")
        for count in (1, 2):
            terminal.process.send_signal(number)
            await terminal.until(f"{name} {count}".encode())
        terminal.process.send_signal(number)
        assert await terminal.status() == 128 + number
        assert terminal.mode == terminal.mode_before


async def test_third_signal_ends_exec_while_nothing_takes_its_output(kernel: Daemon) -> None:
    reader, writer = os.pipe()
    process = fork_server.spawn(
        "agentctl", words_of(kernel, "k1", "yes"), {}, stdout=writer, stderr=writer
    )
    os.close(writer)
    await asyncio.to_thread(os.read, reader, 1)
    for number in THREE:
        process.send_signal(number)
    assert await asyncio.to_thread(process.wait, ENDS_WITHIN_S) == 128 + signal.SIGTERM
    os.close(reader)


async def test_usr1_never_ends_exec(kernel: Daemon) -> None:
    script = f"{TOLD} while :; do sleep 0.1; done"
    with on_terminal(kernel, "-it", "k1", "sh", "-c", script) as terminal:
        await terminal.until(b"ready")
        for count in range(1, 6):
            terminal.process.send_signal(signal.SIGUSR1)
            await terminal.until(b"USR1 %d" % count)


@pytest.mark.parametrize("ignored", [["HUP"], ["INT", "QUIT"], ["TERM"]])
async def test_signal_that_the_caller_ignores_stays_ignored(
    kernel: Daemon, ignored: Sequence[str], tmp_path: Path
) -> None:
    """As under nohup, and in the background of a script."""
    output, traps = tmp_path / "output", f"trap '' {' '.join(ignored)}"
    script = f"{TOLD} trap 'exit 9' USR1; while :; do sleep 0.1; done"
    words = words_of(kernel, "k1", "sh", "-c", script)
    process = subprocess.Popen(
        ["bash", "-c", f'{traps}; exec "$@"', "bash", AGENTCTL, *words], stdout=output.open("wb")
    )
    await until(output.read_text, lambda text: text == "ready\n", within_s=ENDS_WITHIN_S)
    for name in [*ignored, *ignored, *ignored, "USR1"]:
        process.send_signal(signal.Signals[f"SIG{name}"])
    assert await asyncio.to_thread(process.wait, ENDS_WITHIN_S) == 9
    assert output.read_text() == "ready\n"


async def test_terminal_that_is_gone_ends_exec(kernel: Daemon) -> None:
    with on_terminal(kernel, "-it", "k1", "sh", "-c", "trap '' HUP; echo ready; cat") as terminal:
        await terminal.until(b"ready")
        terminal.hang_up()
        terminal.process.send_signal(signal.SIGHUP)
        assert await terminal.status() == 125


async def test_terminal_without_a_size_is_used(kernel: Daemon) -> None:
    """As `ssh -tt` from a script makes one."""
    with on_terminal(kernel, "-it", "k1", "sh", "-c", "echo size; stty size") as terminal:
        assert os.get_terminal_size(terminal._slave) == (0, 0)
        await terminal.until(b"size")
        assert await terminal.status() == 0


@pytest.fixture
async def silent(folder: Path) -> Daemon:
    """A node whose host is gone: it accepts an exec, and sends nothing."""
    gone = asyncio.Event()

    async def accept(request: web.Request) -> web.WebSocketResponse:
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        await websocket.send_bytes(b"\x01ready\r\n")
        await gone.wait()
        return websocket

    app = web.Application()
    app.router.add_get("/v1/kernels/{kernel}/exec", accept)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "agentd.sock")).start()
    yield Daemon(folder, "process")
    gone.set()
    await runner.cleanup()


async def test_silent_node_ends_exec_with_its_terminal_restored(silent: Daemon) -> None:
    deadlines = {"agentd.client.exec.SILENCE_S": 1.0, "agentd.client.exec.CLOSE_TIMEOUT_S": 0.1}
    with on_terminal(silent, "-it", "k1", "sh", deadlines=deadlines) as terminal:
        assert await terminal.status() == 125
        await terminal.until(b"no sign of life for 1 s\r\n")
        assert terminal.mode == terminal.mode_before


async def test_third_signal_ends_exec_at_a_silent_node(silent: Daemon) -> None:
    with on_terminal(silent, "-it", "k1", "sh") as terminal:
        await terminal.until(b"ready")
        for number in THREE:
            terminal.process.send_signal(number)
        assert await terminal.status() == 143
        assert terminal.mode == terminal.mode_before


@pytest.mark.parametrize(
    ("script", "status", "stdout", "stderr"),
    [
        ("$EXEC -i k1 cat <&-", 0, "", ""),
        ("$EXEC -i k1 cat < /dev/null", 0, "", ""),
        ("$EXEC -i k1 cat 0> /dev/null", 125, "", "the input cannot be read: Bad file descriptor"),
        ("$EXEC k1 cat 0> /dev/null", 0, "", ""),
        ("nohup $EXEC -i k1 echo out < /dev/null", 0, "out\n", ""),
        ("yes | $EXEC -i k1 head -1", 0, "y\n", ""),
    ],
)
async def test_unusable_input_is_an_error_and_an_empty_one_an_end(
    kernel: Daemon, script: str, status: int, stdout: str, stderr: str
) -> None:
    done = await in_shell(kernel, script)
    assert (done.status, done.stdout, stderr in done.stderr) == (status, stdout, True), done


@pytest.mark.parametrize(
    ("script", "status", "stderr"),
    [
        ("$EXEC k1 echo out >&-", 74, "the output cannot be written"),
        ("$EXEC k1 echo out > /dev/full", 74, "the output cannot be written: No space left"),
        ("$EXEC k1 sh -c 'echo e >&2; exit 4' 2>&-", 74, ""),
        ("$EXEC k1 sh -c 'exit 4' >&- 2>&-", 4, ""),
        ("set -o pipefail; $EXEC k1 yes | head -1 > /dev/null", 141, ""),
        (
            "set -o pipefail; $EXEC k1 sh -c 'yes >&2' 2>&1 > /dev/full | head -1 > /dev/null",
            141,
            "",
        ),
    ],
)
async def test_output_that_cannot_be_written_is_an_error(
    kernel: Daemon, script: str, status: int, stderr: str
) -> None:
    done = await in_shell(kernel, script)
    assert (done.status, done.stderr.count("\n")) == (status, bool(stderr)), done
    assert stderr in done.stderr


NONBLOCKING = """
import os, subprocess, sys, threading, time
source, feed = os.pipe()
sink, output = os.pipe()
os.set_blocking(source, False)
os.set_blocking(output, False)
process = subprocess.Popen(sys.argv[1:], stdin=source, stdout=output)
os.close(output)
def write():
    for _ in range(64):
        os.write(feed, b"x" * 65536)
    os.close(feed)
threading.Thread(target=write).start()
total = 0
while chunk := os.read(sink, 1000):
    total += len(chunk)
print(total, process.wait())
"""


async def test_non_blocking_streams_lose_nothing(kernel: Daemon) -> None:
    """Another program that shares a pipe or a terminal may have made it non-blocking."""
    command = [sys.executable, "-c", NONBLOCKING, AGENTCTL, *words_of(kernel, "-i", "k1", "cat")]
    done = await asyncio.to_thread(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    )
    assert (done.stdout, done.stderr) == (f"{64 * 65536} 0\n", "")
