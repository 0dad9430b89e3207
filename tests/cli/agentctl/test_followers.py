"""`agentctl logs`, `wait`, `top` and `events`: outages, signals, and what is lost."""

import asyncio
import fcntl
import json
import os
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from agentd import views
from agentd.cli.agentctl.follow import PrintedLog, print_merged
from agentd.errors import UnknownKernel, Unreachable
from support import fork_server
from support.daemon import Daemon
from support.waiting import until
from support.web_server import served

BIN = Path(sys.executable).parent
FASTER = {"agentd.client.following.RETRY_S": 0.05}
WAITS = "; trying again until it answers\n"


class Done(NamedTuple):
    """The end of a program."""

    status: int
    stdout: str
    stderr: str


class Agentctl:
    """A command in a process of its own."""

    def __init__(self, folder: Path, line: str, name: str = "ctl") -> None:
        self._stdout, self._stderr = folder / f"{name}.stdout", folder / f"{name}.stderr"
        arguments = ["--socket", str(folder / "agentd.sock"), *shlex.split(line)]
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            files = {"stdout": out.fileno(), "stderr": err.fileno()}
            self._process = fork_server.spawn("agentctl", arguments, {}, **files, deadlines=FASTER)

    def printed(self) -> str:
        return self._stdout.read_text()

    def told(self) -> str:
        return self._stderr.read_text()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    async def until_catching(self) -> None:
        """Wait until it is past its start, in which a signal has the usual effect."""
        await until(lambda: catches(self._process.pid, signal.SIGTERM), text="a handler of TERM")

    async def done(self) -> Done:
        try:
            status = await asyncio.to_thread(self._process.wait, 40)
        finally:
            self._process.kill()
        return Done(status, self.printed(), self.told())


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler of a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return bool(int(mask, 16) >> number - 1 & 1)


class Stub:
    """A daemon that is there or not, and whose kernels have the state that a test decides."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.requests = 0
        self.state = "running"
        self.is_starting = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if self.is_starting:
            problem = {"code": "NotReady", "detail": "it starts", "status": 503}
            return web.json_response(problem, status=503, headers={"Retry-After": "1"})
        if request.path.endswith("/logs"):
            return web.Response(body=b"rest\n", headers={"Log-Position": "7"})
        if request.path.endswith("/stats"):
            at = f"2026-01-01T00:00:{self.requests:02}Z"
            use = dict.fromkeys(views.KernelUseView.__annotations__)
            return web.json_response([use | {"at": at, "kernel_id": "k1", "devices": []}])
        kernel = {"kernel_id": "k1", "state": self.state}
        if request.path == "/v1/kernels":
            cells = {"agent_id": "a", "allocation": {}, "reason": "", "degraded": []}
            return web.json_response([kernel | cells] * 40_000)
        return web.json_response(kernel)

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        async with served(self._folder / "agentd.sock", self.answer):
            yield
        (self._folder / "agentd.sock").unlink(missing_ok=True)

    async def until_asked(self) -> None:
        before = self.requests
        await until(lambda: self.requests > before, text="a request")


@pytest.mark.parametrize(
    ("line", "kernels"),
    [("wait k1", {"k1"}), ("wait k1 k2", {"k1", "k2"}), ("top --count 1 --interval 1.1", {"k1"})],
)
async def test_follower_waits_for_a_daemon_that_restarts(
    folder: Path, line: str, kernels: set[str]
) -> None:
    stub = Stub(folder)
    async with stub.up():
        running = Agentctl(folder, line)
        await stub.until_asked()
    await until(running.told, lambda text: text.endswith(WAITS), text="a word about the outage")
    stub.is_starting = True
    async with stub.up():
        await stub.until_asked()
        await stub.until_asked()
        stub.is_starting, stub.state = False, "terminated"
        done = await running.done()
    assert (done.status, done.stderr.count("\n")) == (0, 1)
    assert kernels <= {*done.stdout.split()}


async def test_wait_tells_of_each_outage(folder: Path) -> None:
    stub = Stub(folder)
    async with stub.up():
        running = Agentctl(folder, "wait k1")
        await stub.until_asked()
    for outage in (1, 2):
        await until(running.told, lambda text, n=outage: text.count(WAITS) == n)
        async with stub.up():
            await stub.until_asked()
            if outage == 2:
                stub.state = "failed"
                assert (await running.done())[:2] == (0, "k1\n")


async def test_wait_times_out_in_an_outage(folder: Path) -> None:
    stub = Stub(folder)
    async with stub.up():
        running = Agentctl(folder, "wait --timeout 1.5 k1")
        await stub.until_asked()
    done = await running.done()
    assert (done.status, done.stdout) == (3, "")
    assert done.stderr.endswith("agentctl: not ended: k1\n")


async def test_wait_of_many_kernels_asks_a_silent_node_once(folder: Path) -> None:
    """The calls share `--timeout`, instead of a second for each of them."""
    asked: list[str] = []
    released = asyncio.Event()

    async def show(request: web.Request) -> web.Response:
        asked.append(request.match_info["kernel"])
        if len(asked) > 4:
            await released.wait()
        return web.json_response({"kernel_id": "k", "state": "running"})

    app = web.Application()
    app.router.add_get("/v1/kernels/{kernel}", show)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "agentd.sock")).start()
    done = await Agentctl(folder, "wait --timeout 1.5 k1 k2 k3 k4").done()
    released.set()
    await runner.cleanup()
    assert (done.status, asked) == (3, ["k1", "k2", "k3", "k4", "k1"])
    assert done.stderr.endswith("agentctl: not ended: k1, k2, k3, k4\n")


@asynccontextmanager
async def showing(folder: Path, answers: dict[str, list[int]]) -> AsyncIterator[None]:
    """A server whose kernels are shown with these statuses in turn, the last one for good."""

    async def show(request: web.Request) -> web.Response:
        left = answers[request.match_info["kernel"]]
        status = left.pop(0) if len(left) > 1 else left[0]
        state = "terminated" if status == 202 else "running"
        if status == 503:
            problem = {"code": "NodeUnavailable", "status": 503, "detail": "node n2"}
            return web.json_response(problem, status=503)
        return web.json_response({"kernel_id": "k", "state": state})

    app = web.Application()
    app.router.add_get("/v1/kernels/{kernel}", show)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "agentd.sock")).start()
    yield
    await runner.cleanup()


NODES_AWAY = {
    "an outage of one of two": ("wait up down", {"up": [200], "down": [200] + [503] * 3 + [202]}),
    "a node that was never there": ("wait down up", {"up": [200], "down": [503]}),
    "that node last": ("wait up down", {"up": [200], "down": [503]}),
}


@pytest.mark.parametrize("case", NODES_AWAY)
async def test_wait_tells_an_outage_once_however_many_wait(folder: Path, case: str) -> None:
    line, answers = NODES_AWAY[case]
    answers = {kernel: list(statuses) for kernel, statuses in answers.items()}
    async with showing(folder, answers):
        waiting = Agentctl(folder, line)
        if case == "an outage of one of two":
            await until(lambda: waiting.printed() == "down\n", text="the end of the other one")
            answers["up"][:] = [202]
        done = await waiting.done()
    assert done.status == (0 if answers["down"] == [202] else 1)
    assert done.stderr.count("node n2") == 1


@pytest.mark.parametrize("line", ["wait k1", "logs -f k1", "logs -f k1 k2", "top", "events"])
async def test_daemon_that_was_never_there_is_not_waited_for(folder: Path, line: str) -> None:
    done = await Agentctl(folder, line).done()
    assert (done.status, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "No such file or directory" in done.stderr


@pytest.mark.parametrize(
    ("line", "status", "errors"),
    [
        ("logs k1", 1, "agentctl: lost 7 bytes of the output of k1, from byte 0 on\n"),
        ("logs --tail 1 k1", 0, ""),
        ("logs --since 2026-01-01T00:00:00Z k1", 0, ""),
    ],
)
async def test_logs_name_output_that_is_lost(
    folder: Path, line: str, status: int, errors: str
) -> None:
    async with Stub(folder).up():
        done = await Agentctl(folder, line).done()
    assert done == (status, "rest\n", errors)


async def test_top_on_a_terminal_survives_an_outage(folder: Path) -> None:
    """The line about it is above the table, and the cursor is shown again."""
    stub, shown = Stub(folder), bytearray()
    ours, theirs = os.openpty()
    env = {
        "TERM": "xterm",
        "COLUMNS": "200",
        "LINES": "24",
        "AGENTD_SOCKET": f"{folder}/agentd.sock",
    }
    async with stub.up():
        command = [BIN / "agentctl", "top", "--interval", "1.1"]
        process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | env)
        os.close(theirs)
        reading = asyncio.create_task(asyncio.to_thread(read_terminal, ours, shown))
        await until(lambda: b"KERNEL" in shown, text="a table")
    await until(lambda: b"trying again" in shown, text="a word about the outage")
    tables = shown.count(b"KERNEL")
    async with stub.up():
        await until(lambda: shown.count(b"KERNEL") > tables + 1, text="another table")
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(reading, 20)
    assert process.wait(20) == 143
    before = bytes(shown).partition(b"agentctl: Unreachable")[0]
    assert before.endswith(b"\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K")
    assert bytes(shown).endswith(b"\x1b[?25h")


def read_terminal(descriptor: int, shown: bytearray) -> None:
    """Read to the end, which is an error (EIO), and close the terminal."""
    with suppress(OSError):
        while True:
            shown += os.read(descriptor, 65536)
    os.close(descriptor)


SPEAKING = "i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo line $i; sleep 0.01; done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_logs_are_complete_after_a_restart(up: Daemon, number: int) -> None:
    for kernel_id in ("k1", "k2"):
        await up.running(kernel_id=kernel_id, command=["sh", "-c", SPEAKING], slots={"cpu": 0})
    one = Agentctl(up.folder, "logs -f k1", "one")
    two = Agentctl(up.folder, "logs -f k1 k2", "two")
    for running in (one, two):
        await until(running.printed, lambda text: "line 20" in text, text="20 lines")
    await up.restart(number=number)
    lines = [f"line {number}" for number in range(1, 401)]
    status, stdout, told = await one.done()
    assert (status, stdout.splitlines(), told.count("\n")) == (0, lines, 1)
    status, stdout, told = await two.done()
    assert (status, told.count("\n")) == (0, 2)
    for kernel_id in ("k1", "k2"):
        lead = f"{kernel_id} | "
        own = [line for line in stdout.splitlines() if line.startswith(lead)]
        assert own == [lead + line for line in lines]


async def test_events_go_on_after_a_restart(up: Daemon) -> None:
    running = Agentctl(up.folder, "events -o json")
    await until_listening(up, running)
    await up.restart()
    await until(running.printed, lambda text: '"event": "reset"' in text, text="a reset")
    await up.running(kernel_id="k2", slots={"cpu": 0})
    await until(running.printed, lambda text: '"k2"' in text, text="events of k2")
    running.send(signal.SIGINT)
    done = await running.done()
    assert (done.status, done.stderr.count(WAITS), done.stderr.count("\n")) == (130, 1, 1)
    for line in done.stdout.splitlines():
        assert json.loads(line).keys() == {"id", "at", "event", "data"}


async def until_listening(up: Daemon, running: Agentctl) -> None:
    """Create and delete kernels until an event of one is printed."""
    while not running.printed():
        await up.running(kernel_id="k1", slots={"cpu": 0})
        await up.call("DELETE", "/v1/kernels/k1?timeout=0")


async def test_events_begin_after_the_given_id(up: Daemon) -> None:
    first = Agentctl(up.folder, "events -o json", "first")
    await until_listening(up, first)
    first.send(signal.SIGTERM)
    event = json.loads((await first.done()).stdout.splitlines()[0])
    assert event["at"].endswith("Z")
    later = Agentctl(up.folder, f"events -o json --after {event['id']}", "later")
    await until(later.printed, lambda text: "kernel-removed" in text, text="the later events")
    later.send(signal.SIGHUP)
    done = await later.done()
    following = json.loads(done.stdout.splitlines()[0])
    assert (done.status, done.stderr) == (129, "")
    assert int(following["id"].rpartition("-")[2]) == int(event["id"].rpartition("-")[2]) + 1


@pytest.mark.parametrize(
    "line", ["wait k1", "logs -f k1", "logs -f k1 k1", "events", "top", "ui --print"]
)
async def test_signal_ends_a_follower_without_a_word(up: Daemon, line: str) -> None:
    await up.running(kernel_id="k1", command=["sh", "-c", "echo x; sleep 1000"], slots={"cpu": 0})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        running = Agentctl(up.folder, line)
        await running.until_catching()
        running.send(number)
        done = await running.done()
        assert (done.status, done.stderr) == (128 + number, "")


async def test_ignored_signals_stay_ignored(up: Daemon) -> None:
    await up.running(kernel_id="k1", slots={"cpu": 0})
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", f"trap '' INT HUP; exec {BIN}/agentctl --socket {up.folder}/agentd.sock wait k1"
    )
    await until(lambda: catches(process.pid, signal.SIGTERM), text="a handler of TERM")
    for number in (signal.SIGINT, signal.SIGHUP):
        assert not catches(process.pid, number)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 20) == 143


class Logs:
    """Logs by kernel: chunks, and errors that end them."""

    def __init__(self, **parts: list[bytes | BaseException]) -> None:
        self._parts = parts

    def reader(self, kernel: str) -> PrintedLog:
        def read(*, on_dropped: Callable[[int, int], object], **_: Any) -> Iterator[bytes]:
            for part in self._parts[kernel]:
                if isinstance(part, BaseException):
                    raise part
                if part == b"lost":
                    on_dropped(10, 30)
                else:
                    yield part

        return PrintedLog(read, kernel)


def merged(
    capfdbinary: pytest.CaptureFixture[bytes], **parts: Any
) -> tuple[bytes, str, list[bool]]:
    readers = [Logs(**parts).reader(kernel) for kernel in parts]
    print_merged(readers)
    out, err = capfdbinary.readouterr()
    return out, err.decode(), [reader.is_incomplete for reader in readers]


def test_each_log_that_fails_is_told(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    out, err, incomplete = merged(
        capfdbinary,
        a=[b"1\n2", b"\n3", UnknownKernel("no a")],
        bb=[b"1", b"", b"\n\n2\n"],
        c=[UnknownKernel("no c")],
        d=[b"1\n", b"lost", b"2\n"],
    )
    lines = [b"a  | 1", b"a  | 2", b"a  | 3", b"bb | ", b"bb | 1", b"bb | 2", b"d  | 1", b"d  | 2"]
    assert sorted(out.splitlines()) == lines
    assert sorted(err.splitlines()) == [
        "agentctl: UnknownKernel: no a",
        "agentctl: UnknownKernel: no c",
        "agentctl: lost 20 bytes of the output of d, from byte 10 on",
    ]
    assert incomplete == [True, False, True, True]


@pytest.mark.parametrize("error", [ValueError("a mistake of ours"), Unreachable("no daemon")])
def test_error_of_a_thread_reaches_the_command(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        print_merged([Logs(a=[b"x", error]).reader("a"), Logs(b=[]).reader("b")])


def test_long_line_in_small_chunks_takes_linear_time(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """With a copy of the line for each chunk, this takes minutes."""
    out, _, _ = merged(capfdbinary, a=[b"x" * 1024] * 60_000 + [b"\n"], b=[])
    assert (len(out), out.count(b"x"), out.count(b"\n")) == (61_440_000 + 5, 61_440_000, 1)


def test_endless_line_is_cut(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentd.cli.agentctl.follow.MAX_LINE", 5)
    out, _, _ = merged(capfdbinary, a=[b"123", b"456", b"7", b"8\n9"])
    assert out == b"a | 123456\na | 78\na | 9\n"


async def test_output_that_does_not_block_is_written_whole(up: Daemon) -> None:
    """A program that shares the pipe may have made it non-blocking."""
    script = "head -c 3000000 /dev/zero | tr '\\0' x"
    await up.create(kernel_id="k1", command=["sh", "-c", script], slots={"cpu": 0})
    await up.until("k1", "terminated")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [BIN / "agentctl", "--socket", up.folder / "agentd.sock", "logs", "k1"]
    process = subprocess.Popen(command, stdout=writer)
    os.close(writer)
    with open(reader, "rb") as output:  # noqa: PTH123 - a descriptor
        await until(lambda: unread(reader), lambda size: size == 1 << 16, text="a full pipe")
        assert len(await asyncio.to_thread(output.read)) == 3_000_000
    assert await asyncio.to_thread(process.wait, 20) == 0


def unread(pipe: int) -> int:
    """Return the bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


async def test_signal_ends_a_command_that_waits_for_its_reader(folder: Path) -> None:
    reader, writer = os.pipe()
    async with Stub(folder).up():
        command = [BIN / "agentctl", "--socket", folder / "agentd.sock", "ls", "-q"]
        process = subprocess.Popen(command, stdout=writer)
        os.close(writer)
        await until(lambda: unread(reader), lambda size: size > 65_000, text="a full pipe")
        process.terminate()
        assert await asyncio.to_thread(process.wait, 20) == 143
    os.close(reader)


@pytest.mark.parametrize("line", ["logs -f k1", "logs -f k1 k1", "wait k1", "events", "top"])
async def test_follower_ends_when_its_reader_leaves(up: Daemon, line: str) -> None:
    """As in `agentctl logs -f k1 | grep -q ready`: the kernel prints nothing more."""
    await up.running(kernel_id="k1", command=["sh", "-c", "echo x; sleep 1000"], slots={"cpu": 0})
    reader, writer = os.pipe()
    process = fork_server.spawn(
        "agentctl",
        ["--socket", str(up.folder / "agentd.sock"), *line.split()],
        {},
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    await until(lambda: catches(process.pid, signal.SIGPIPE), text="a handler of PIPE")
    os.close(reader)
    assert await asyncio.to_thread(process.wait, 20) == 141
