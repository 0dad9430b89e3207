"""`agentctl run` and its three standard streams: who left, what failed, what has data."""

import asyncio
import os
import pty
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.scripted_node import BIN, Agentctl, ScriptedNode

MANY = b"0123456789abcde\n" * 4096


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[ScriptedNode]:
    made = ScriptedNode()
    made.accept()
    made.log = [MANY]
    async with made.serving(folder):
        yield made


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """Yield both ends of a pipe, and close those that are still open."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            with open(end, closefd=True):  # noqa: PTH123
                pass


@pytest.mark.parametrize("words", [(), ("--rm",)], ids=["", "--rm"])
async def test_reader_that_leaves_stops_the_kernel(up: Daemon, words: tuple[str, ...]) -> None:
    command = f"{BIN}/agentctl run agent-1 --id k1 {' '.join(words)} -- yes"
    script = f"set -o pipefail; {command} | head -1"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", script, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "AGENTD_SOCKET": str(up.folder / "agentd.sock")},
    )  # fmt: skip
    output, errors = await asyncio.wait_for(process.communicate(), 40)
    assert (process.returncode, output, errors) == (141, b"y\n", b"")
    states = [kernel["state"] for kernel in await up.get("/v1/kernels")]
    assert states == ([] if words else ["terminated"])


UNWRITABLE = {
    "a full disk": ("/dev/full", os.O_WRONLY, "No space left on device"),
    "a descriptor for reading": ("/dev/null", os.O_RDONLY, "Bad file descriptor"),
}


@pytest.mark.parametrize(("path", "mode", "reason"), UNWRITABLE.values(), ids=UNWRITABLE)
async def test_output_that_fails_leaves_the_kernel(
    node: ScriptedNode, folder: Path, path: str, mode: int, reason: str
) -> None:
    output = os.open(path, mode)
    running = Agentctl(folder, "run", "agent-1", "--id", "k1", "--rm", "--", "true", stdout=output)
    os.close(output)
    done = await running.done()
    assert done.status == 74
    assert done.stderr.startswith(f"agentctl: the output cannot be written: {reason}; kernel k1 ")
    assert done.stderr.count("\n") == 1
    assert "agentctl logs k1" in done.stderr
    assert "agentctl wait" not in done.stderr, "the node deletes it after its end was read"
    assert node.calls == ["create"]


CLOSED = {"output": ("exec >&-;", 74), "input": ("exec <&-;", 0), "errors": ("exec 2>&-;", 0)}


@pytest.mark.parametrize(("prefix", "status"), CLOSED.values(), ids=CLOSED)
async def test_run_with_a_closed_stream_ends(
    node: ScriptedNode, folder: Path, prefix: str, status: int
) -> None:
    node.ended.set()
    words = ("run", "agent-1", "--id", "k1", "--", "true")
    assert (await Agentctl(folder, *words, prefix=prefix).done()).status == status


async def test_output_of_an_ended_kernel_is_not_removed(node: ScriptedNode, folder: Path) -> None:
    node.ended.set()
    output = os.open("/dev/full", os.O_WRONLY)
    words = ("run", "agent-1", "--id", "k1", "--rm", "--", "true")
    done = await Agentctl(folder, *words, stdout=output).done()
    os.close(output)
    assert (done.status, node.calls) == (74, ["create"])


UNREADABLE = {
    "errors": ({"stderr": "Forbidden"}, "Forbidden"),
    "output": ({"stdout": "Refused"}, "Refused"),
    "joined streams": (dict.fromkeys(("stdout", "stderr", "both"), "InvalidRequest"), "Invalid"),
}


@pytest.mark.parametrize(("refused", "code"), UNREADABLE.values(), ids=UNREADABLE)
async def test_output_that_cannot_be_read_is_left_with_its_kernel(
    node: ScriptedNode, folder: Path, refused: dict[str, str], code: str
) -> None:
    node.ended.set()
    node.refused = refused
    words = ("run", "agent-1", "--id", "k1", "--rm", "--", "true")
    done = await Agentctl(folder, *words).done()
    assert (done.status, node.calls) == (125, ["create"])
    assert f"agentctl: {code}" in done.stderr
    assert "kernel k1 may run: agentctl logs k1, agentctl stop k1\n" in done.stderr


async def test_joined_streams_are_printed_once(node: ScriptedNode, folder: Path) -> None:
    node.ended.set()
    node.refused = dict.fromkeys(("stdout", "stderr"), "InvalidRequest")
    done = await Agentctl(folder, "run", "agent-1", "--id", "k1", "--", "true").done()
    assert done == (0, MANY.decode(), "")


async def test_non_blocking_output_is_waited_for(node: ScriptedNode, folder: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    node.log = [MANY] * 8
    running = Agentctl(folder, "run", "agent-1", "--id", "k1", "--", "true", stdout=writer)
    os.close(writer)
    await node.until_called("create")
    with open(reader, "rb") as file:  # noqa: PTH123
        read = asyncio.create_task(asyncio.to_thread(file.read))
        node.end(0)
        assert (await running.done())[::2] == (0, "")
        assert await read == MANY * 8


async def test_end_is_read_after_the_whole_output(node: ScriptedNode, folder: Path) -> None:
    """A node deletes a kernel of --rm ten seconds after its end was read."""
    reader, writer = os.pipe()
    node.log = [MANY] * 16
    running = Agentctl(folder, "run", "agent-1", "--id", "k1", "--", "true", stdout=writer)
    os.close(writer)
    with open(reader, "rb") as file:  # noqa: PTH123
        first = await asyncio.to_thread(file.read, len(MANY))
        node.end(3)
        running.send(signal.SIGUSR1)
        await node.until_called("create", "USR1")
        rest = await asyncio.to_thread(file.read)
    assert first + rest == MANY * 16
    assert (await running.done()).status == 3
    assert node.calls == ["create", "USR1", "read"]


async def test_terminal_that_hangs_up_is_a_hangup_for_the_kernel(
    node: ScriptedNode, folder: Path
) -> None:
    node.ends_of = {"HUP"}
    ours, theirs = pty.openpty()
    words = ("run", "agent-1", "--id", "k1", "--rm", "--", "true")
    agentctl = BIN / "agentctl", "--socket", folder / "agentd.sock"
    process = subprocess.Popen(
        ["setsid", "--ctty", *agentctl, *words], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert await asyncio.to_thread(os.read, ours, 5) == b"01234"
    os.close(ours)
    assert await asyncio.to_thread(process.wait, 40) == 0
    assert node.calls == ["create", "HUP", "read", "delete"]


def file_with(folder: Path, text: str, position: int = 0) -> int:
    (folder / "stdin").write_text(text)
    descriptor = os.open(folder / "stdin", os.O_RDONLY)
    os.lseek(descriptor, position, os.SEEK_SET)
    return descriptor


def pipe_with(data: bytes) -> int:
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    return reader


def socket_with(data: bytes) -> int:
    ours, theirs = socket.socketpair()
    ours.send(data) if data else None
    ours.close()
    return theirs.detach()


def terminal_with(data: bytes) -> int:
    ours, theirs = pty.openpty()
    os.write(ours, data)
    return theirs


def closed() -> int:
    return -1


STDIN: dict[str, tuple[Callable[[Path], int], bool]] = {
    "a file": (lambda folder: file_with(folder, "data"), True),
    "a file at its end": (lambda folder: file_with(folder, "data", 4), False),
    "an empty file": (lambda folder: file_with(folder, ""), False),
    "a pipe with bytes": (lambda _: pipe_with(b"x\n"), True),
    "a pipe at its end": (lambda _: pipe_with(b""), False),
    "a socket with bytes": (lambda _: socket_with(b"x"), True),
    "a socket at its end": (lambda _: socket_with(b""), False),
    "a terminal with keys": (lambda _: terminal_with(b"x\n"), False),
    "nothing": (lambda _: os.open(os.devnull, os.O_RDONLY), False),
    "a file for writing": (lambda _: os.open(__file__, os.O_WRONLY), False),
}


@pytest.mark.parametrize(("opened", "is_refused"), STDIN.values(), ids=STDIN)
async def test_stdin_with_data_is_refused(
    node: ScriptedNode, folder: Path, opened: Callable[[Path], int], is_refused: bool
) -> None:
    stdin = opened(folder)
    node.ended.set()
    node.log = ()
    done = await Agentctl(folder, "run", "agent-1", "--id", "k1", "--", "true", stdin=stdin).done()
    os.close(stdin)
    assert (done.status, node.calls[:1]) == ((2, []) if is_refused else (0, ["create"]))
    assert ("< /dev/null" in done.stderr) == is_refused
