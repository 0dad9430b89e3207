"""Commands inside kernels, under those who mean harm, and when things end at a bad time."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentd.client import AsyncClient
from agentd.client import exec as client_exec
from agentd.errors import Unreachable
from agentd.host.cgroups.usage import read_cgroups
from agentd.procfs import read_uids
from end_to_end.test_exec import SLEEPER, ran, websocket
from support.daemon import AGENTS, BASE, Daemon, gpus, until_no_process
from support.daemon_pool import Serving
from support.waiting import until

LASTING = ["sh", "-c", "echo; sleep 100000"]


@pytest.fixture
async def daemon(serving: Serving) -> Daemon:
    return await serving(AGENTS + gpus(1))


async def begun(running) -> None:
    """Wait for the first thing that a command prints."""
    await anext(aiter(running))


async def ended(running) -> int:
    """Wait for the end of a command, and return its exit code."""
    async with asyncio.timeout(10):
        async for _ in running:
            pass
    return int(running.exit_code)


@pytest.mark.needs("cgroups")
async def test_no_root_process_is_ever_in_a_kernels_cgroup(plain: Daemon) -> None:
    """Every process in there may pass for the kernel's, and the kernel can signal it."""
    await plain.start(AGENTS + gpus(1))
    kernel = await plain.running(kernel_id="k1", command=SLEEPER)
    pid = plain.main_pid(kernel, None)
    (wanted,) = read_uids(pid)
    group = max(name for name in read_cgroups(pid) if name.startswith(("pids:", ":")))
    cgroup = next(Path("/sys/fs/cgroup").glob(f"**/{Path(group).name}/cgroup.procs"))
    seen: set[int] = set()
    is_over = False

    def watch() -> None:
        while not is_over:
            for member in map(int, cgroup.read_text().split()):
                seen.update(read_uids(member))

    watching = asyncio.create_task(asyncio.to_thread(watch))
    try:
        async with AsyncClient(plain.folder / "agentd.sock") as client:
            for _ in range(10):
                async with client.exec("k1", ["true"]) as running:
                    assert await ended(running) == 0
    finally:
        is_over = True
    await watching
    assert seen == {wanted}


async def test_a_command_that_is_stopped_ends_with_its_caller(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    marker = os.urandom(8).hex()
    script = "echo; kill -STOP $$"
    async with client.exec("k1", ["sh", "-c", script], env={"MARKER": marker}) as running:
        await begun(running)
    await until_no_process(marker)


@pytest.mark.parametrize("does", ["exec sleep 1000", "while :; do echo y; done"])
async def test_disconnected_client_leaves_no_command(
    daemon, client, monkeypatch, does: str
) -> None:
    """A client that does not read misses the close of the far end."""
    monkeypatch.setattr(client_exec, "CLOSE_TIMEOUT_S", 0.5)
    await daemon.running(kernel_id="k1", command=SLEEPER)
    marker = os.urandom(8).hex()
    async with asyncio.timeout(20):
        async with client.exec("k1", ["sh", "-c", f"echo; {does}"], env={"MARKER": marker}) as it:
            await begun(it)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await it.write(bytes(8 << 20))
    await until_no_process(marker)


async def test_a_signal_overtakes_input_that_is_not_taken(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    script = "trap 'exit 9' USR1; echo ready; while :; do sleep 0.05; done"
    async with client.exec("k1", ["sh", "-c", script]) as running:
        await begun(running)
        await running.write(bytes(256 * 1024))
        await running.send_signal("USR1")
        assert await ended(running) == 9


async def test_signal_arrives_after_repeated_input_closes(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    async with client.exec("k1", SLEEPER) as running:
        for _ in range(20):
            await running.close_input()
            await running.write(b"too late")
        await running.send_signal("KILL")
        assert await ended(running) == 137


async def test_pings_do_not_replace_the_first_frame(plain: Daemon) -> None:
    plain.deadlines = {"agentd.rpc.exec_websocket.FIRST_FRAME_S": 1.0}
    await plain.start(AGENTS)
    await plain.running(kernel_id="k1", command=SLEEPER)
    async with websocket(plain, autoping=False) as wire, asyncio.timeout(30):
        told = None
        while told is None:
            await wire.ping()
            with contextlib.suppress(TimeoutError):
                while told is None:
                    frame = await wire.receive(timeout=0.1)
                    told = frame if frame.type is aiohttp.WSMsgType.TEXT else None
    assert told.json()["problem"]["errors"][0]["why"] == "no first frame in 1 s"


async def test_node_gives_a_sign_of_life_before_the_command_starts(daemon) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    async with websocket(daemon, autoping=False) as wire, asyncio.timeout(30):
        assert (await wire.receive()).type is aiohttp.WSMsgType.PONG


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_command_ends_with_its_kernel(daemon, client, how: str) -> None:
    """Nobody keeps a kernel's devices by a shell that was forgotten in it."""
    kernel = await daemon.running(kernel_id="k1", command=SLEEPER)
    marker = os.urandom(8).hex()
    async with client.exec("k1", LASTING, env={"MARKER": marker}) as running:
        await begun(running)
        if how == "stopped":
            await daemon.call("POST", "/v1/kernels/k1/stop", {"timeout": 0})
        else:
            os.kill(daemon.main_pid(kernel, daemon.test_engine), signal.SIGKILL)
        assert await ended(running) in (137, 143)
    await until_no_process(marker)
    await daemon.until("k1", "terminated")


async def test_a_stop_of_the_daemon_ends_commands_and_is_not_held_up(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    marker = os.urandom(8).hex()
    async with client.exec("k1", LASTING, env={"MARKER": marker}) as running:
        await begun(running)
        async with asyncio.timeout(10):
            await daemon.stop()
        with pytest.raises(Unreachable):
            await ended(running)
    await until_no_process(marker)
    await daemon.start()
    assert (await daemon.get("/v1/kernels/k1"))["state"] == "running"


async def test_a_daemon_that_dies_leaves_no_command_for_long(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    marker = os.urandom(8).hex()
    async with client.exec("k1", LASTING, env={"MARKER": marker}) as running:
        await begun(running)
        await daemon.restart(number=signal.SIGKILL)
    await until_no_process(marker)
    assert (await daemon.get("/v1/kernels/k1"))["state"] == "running"


async def test_a_terminal_passes_on_every_key(daemon, client) -> None:
    """The engine's own way to leave one is what shells and editors use."""
    await daemon.running(kernel_id="k1", command=SLEEPER)
    script = "stty raw -echo; echo ready; dd bs=1 count=3 2>/dev/null | od -An -tx1"
    seen = b""
    async with client.exec("k1", ["sh", "-c", script], tty=True) as running:
        async for _, data in running:
            seen += data
            if seen.endswith(b"ready\n"):
                await running.write(b"\x10\x11x")
    assert b"10 11 78" in seen


async def test_streams_can_be_opened_by_name(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    script = "echo here > /dev/stdout"
    assert await ran(client, "sh", "-c", script) == (0, b"here\n", b"")


async def test_exec_is_audited_when_it_begins(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    async with client.exec("k1", LASTING) as running:
        await begun(running)
        assert '"outcome": "begun"' in daemon.log
    with pytest.raises(Exception, match="no-such"):
        async with client.exec("k1", ["no-such"]) as running:
            await begun(running)
    assert '"outcome": "CommandNotFound"' in daemon.log


async def test_a_kernel_that_was_given_the_id_meanwhile_is_another_one(daemon, client) -> None:
    await daemon.running("agent-1", kernel_id="k1", command=SLEEPER)
    async with websocket(daemon) as wire:
        assert (await daemon.call("DELETE", "/v1/kernels/k1")).status == 204
        await daemon.running("agent-2", kernel_id="k1", command=SLEEPER, env={"SECRET": "x"})
        await wire.send_json({"command": ["env"]})
        answer = await wire.receive_json(timeout=20)
    assert answer["problem"]["code"] == "UnknownKernel"


async def test_a_caller_that_reads_nothing_and_half_closes_is_let_go(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    ends = await asyncio.open_unix_connection(str(daemon.folder / "agentd.sock"))
    await start_by_hand(ends, {"command": ["yes"]})
    reader, writer = ends
    await reader.read(1)
    writer.transport.pause_reading()
    held = Path(f"/proc/{daemon.process.pid}/fd")

    def sockets() -> int:
        found = 0
        for file in held.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
                found += "socket" in str(file.readlink())
        return found

    before = sockets()
    writer.write_eof()
    await until(lambda: sockets() < before, within_s=8)
    writer.close()


async def start_by_hand(
    ends: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: dict[str, Any]
) -> None:
    """Start a command in k1 over a connection, by the bytes of RFC 6455 with a mask of zeros."""
    reader, writer = ends
    writer.write(
        b"GET /v1/kernels/k1/exec HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nAuthorization: Bearer secret\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    await reader.readuntil(b"\r\n\r\n")
    frame = json.dumps(request).encode()
    writer.write(bytes([0x81, 0x80 | len(frame), 0, 0, 0, 0]) + frame)


def tcp_listener(folder: Path) -> tuple[int, str, str]:
    """Return a free port, and `listen` and `token-file` for it; the token is `secret`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = folder / "token"
    token.touch(0o600)
    token.write_text("secret\n")
    return port, f'listen = "127.0.0.1:{port}"', f'token-file = "{token}"'


async def hang_up_behind_input(port: int, marker: str) -> None:
    """Run a command in k1 that reads nothing, send all that the connection takes, and close it."""
    ends = await asyncio.open_connection("127.0.0.1", port)
    command = ["sh", "-c", "echo; exec sleep 100000"]
    await start_by_hand(ends, {"command": command, "env": {"MARKER": marker}})
    reader, writer = ends
    await reader.readuntil(b"\n")
    frame = bytes([0x82, 0x80 | 126, 0xFF, 0xFF, 0, 0, 0, 0]) + bytes(0xFFFF)
    sent = 0
    with writer.get_extra_info("socket").dup() as sock, contextlib.suppress(BlockingIOError):
        while True:
            sent += sock.send(frame[sent % len(frame) :])
    writer.transport.abort()


async def test_hangup_behind_unread_input_ends_the_command(plain: Daemon) -> None:
    """Its end arrives behind what is not read, so only an answer to it shows that it has gone."""
    port, listen, token = tcp_listener(plain.folder)
    plain.configure(AGENTS, BASE.replace("[host]", f"{listen}\n{token}\n[host]"))
    await plain.start()
    await plain.running(kernel_id="k1", command=SLEEPER)
    marker = os.urandom(8).hex()
    await hang_up_behind_input(port, marker)
    await until_no_process(marker)
