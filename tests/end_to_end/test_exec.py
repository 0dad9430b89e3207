"""Commands inside kernels: what goes in and comes out, how they end, and what they may not."""

import asyncio
import contextlib
import hashlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentd.client import AsyncClient
from agentd.errors import CommandNotFound, InvalidRequest, KernelConflict, UnknownKernel
from agentd.host.processes import all_processes
from support.daemon import AGENTS, Daemon, gpus
from support.daemon_pool import Serving
from support.host_faults import HOSTILE_NAMES, named_command
from support.waiting import until

SLEEPER = ["sleep", "100000"]


@pytest.fixture
async def daemon(serving: Serving) -> Daemon:
    return await serving(AGENTS + gpus(1))


async def ran(client: AsyncClient, *command: str, given: bytes = b"", **options):
    """Run a command to its end; return its exit code, its output and its errors."""
    streams = {1: b"", 2: b""}
    async with client.exec("k1", command, **options) as running:
        if given:
            await running.write(given)
        await running.close_input()
        async for stream, data in running:
            streams[stream] += data
    return running.exit_code, streams[1], streams[2]


@contextlib.asynccontextmanager
async def websocket(
    daemon: Daemon, **options: Any
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """Open the WebSocket of an exec in k1, and send nothing."""
    connector = aiohttp.UnixConnector(str(daemon.folder / "agentd.sock"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.ws_connect("http://agentd/v1/kernels/k1/exec", **options) as wire,
    ):
        yield wire


async def test_a_command_has_what_its_kernel_has(daemon: Daemon, client: AsyncClient) -> None:
    await daemon.running(
        kernel_id="k1", command=SLEEPER, slots={"cpu": 1, "cuda.device": 1},
        env={"MINE": "a b"}, working_dir="/tmp",
    )  # fmt: skip
    lines = (await ran(client, "env"))[1].decode().splitlines()
    env = dict(line.split("=", 1) for line in lines)
    assert (env["MINE"], env["CUDA_VISIBLE_DEVICES"]) == ("a b", "cuda0")
    assert (await ran(client, "pwd"))[1] == b"/tmp\n"
    status = (await ran(client, "cat", "/proc/self/status"))[1].decode()
    pid = daemon.main_pid(await daemon.get("/v1/kernels/k1"), daemon.test_engine)
    own = Path(f"/proc/{pid}/status").read_text()
    for member in ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "NoNewPrivs", "Cpus_allowed_list"):
        mine, kernels = (
            next(line for line in text.splitlines() if line.startswith(f"{member}:"))
            for text in (status, own)
        )
        assert mine.split() == kernels.split(), member
    assert len((await ran(client, "nproc"))[1]) == 2
    code, told, _ = await ran(client, "sh", "-c", "echo $X; pwd", env={"X": "y"}, working_dir="/")
    assert (code, told) == (0, b"y\n/\n")


@pytest.mark.parametrize("name", HOSTILE_NAMES)
async def test_exec_works_in_a_kernel_of_any_name(daemon, client, name: bytes) -> None:
    await daemon.running(kernel_id="k1", command=named_command(name))
    await until(
        lambda: daemon.call("GET", "/v1/kernels/k1/logs"),
        lambda value: b"named" in value.content,
        within_s=30,
    )
    assert (await ran(client, "echo", "in"))[:2] == (0, b"in\n")
    assert (await daemon.call("GET", "/v1/node?check=true")).status == 200


@pytest.mark.needs("cgroups")
async def test_exec_counts_towards_its_kernel(daemon: Daemon, client: AsyncClient) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    async with client.exec("k1", ["sh", "-c", "echo; sleep 1000 & wait"]) as running:
        await anext(aiter(running))
        await until(lambda: client.stats("k1"), lambda value: value["processes"] == 3, within_s=10)


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 7", 7), ("true", 0), ("kill -9 $$", 137), ("kill -TERM $$", 143)],
)
async def test_exec_returns_the_exit_status(daemon, client, script: str, code: int) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    assert await ran(client, "sh", "-c", script) == (code, b"", b"")


async def test_large_and_binary_input_and_output_arrive_as_they_are(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER, slots={"mem": "256m"})
    total = 1024 if os.environ.get("AGENTD_SOAK") else 64
    wanted, got, length = hashlib.sha256(), hashlib.sha256(), 0
    async with client.exec("k1", ["cat"]) as running:

        async def feed() -> None:
            for _ in range(total):
                block = os.urandom(1 << 20)
                wanted.update(block)
                await running.write(block)
            await running.close_input()

        feeding = asyncio.create_task(feed())
        async for stream, data in running:
            assert stream == 1
            got.update(data)
            length += len(data)
        await feeding
    assert (running.exit_code, length) == (0, total << 20)
    assert got.digest() == wanted.digest()


async def test_exec_separates_streams_and_loses_no_output(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    script = "echo out; echo err >&2; exit 3"
    for _ in range(5):
        assert await ran(client, "sh", "-c", script) == (3, b"out\n", b"err\n")
    assert await ran(client, "sh", "-c", "cat; echo", given=b"\x00\xff") == (0, b"\x00\xff\n", b"")


async def test_a_terminal_has_a_size_and_takes_keys(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    seen, is_told = b"", False
    script = "test -t 0 && test -t 1 && echo is one; read line; stty size; echo got $line; exit 5"
    async with client.exec("k1", ["sh", "-c", script], tty=True) as running:
        async for stream, data in running:
            assert stream == 1
            seen += data
            if b"is one" in seen and not is_told:
                is_told = True  # what is sent once it has ended can cost the last answer
                await running.resize(123, 45)
                await running.write(b"hello\r")
    assert b"45 123" in seen
    assert b"got hello" in seen
    assert running.exit_code == 5


async def test_a_caller_that_goes_away_ends_it_and_the_kernel_goes_on(daemon, client) -> None:
    kernel = await daemon.running(kernel_id="k1", command=SLEEPER)
    marker = f"999{os.getpid() % 1000}"
    script = f"trap '' TERM HUP; echo; sleep {marker} & sleep {marker}"
    async with client.exec("k1", ["sh", "-c", script]) as running:
        await anext(aiter(running))

    def left() -> list[int]:
        found = []
        for process in all_processes():
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if marker.encode() in words:
                found.append(process.pid)
        return found

    await until(lambda: not left(), within_s=10)
    assert (await daemon.get("/v1/kernels/k1"))["state"] == "running"
    assert Path(f"/proc/{daemon.main_pid(kernel, daemon.test_engine)}").exists()


async def test_exec_that_cannot_start_leaves_nothing(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    for error, command, options in (
        (CommandNotFound, ["no-such-program"], {}),
        (InvalidRequest, [], {}),
        (InvalidRequest, ["true"], {"env": {"A=B": "c"}}),
        (InvalidRequest, ["a\0b"], {}),
        (InvalidRequest, [""], {}),
        (InvalidRequest, ["a" * 5000], {}),
        (CommandNotFound, ["a" * 300], {}),
        (CommandNotFound, ["/bin/" + "a" * 300], {}),
        (InvalidRequest, ["true"], {"working_dir": "tmp"}),
        (InvalidRequest, ["true"], {"env": {"AGENTD_KERNEL": "k2"}}),
        (InvalidRequest, ["true"], {"env": {"CUDA_VISIBLE_DEVICES": "cuda0"}}),
    ):
        with pytest.raises(error):
            await ran(client, *command, **options)
    with pytest.raises(UnknownKernel):
        async with client.exec("k2", ["true"]):
            pass
    await daemon.call("POST", "/v1/kernels/k1/stop", {"timeout": 0})
    with pytest.raises(KernelConflict):
        async with client.exec("k1", ["true"]):
            pass
    plain = await daemon.call("GET", "/v1/kernels/k1/exec")
    assert plain.status in (409, 422)


async def test_variable_of_a_plugin_is_refused_for_what_it_gave(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER, slots={"cuda.device": 1})
    with pytest.raises(InvalidRequest) as refused:
        await ran(client, "env", env={"CUDA_VISIBLE_DEVICES": "cuda1", "OTHER": "x"})
    assert [problem.where for problem in refused.value.problems] == ["env.CUDA_VISIBLE_DEVICES"]
    assert b"OTHER=x" in (await ran(client, "env", env={"OTHER": "x"}))[1]


async def test_first_frame_has_each_member_once(daemon) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    async with websocket(daemon) as wire:
        await wire.send_str('{"command": ["true"], "command": ["false"]}')
        answer = await wire.receive_json(timeout=20)
    assert answer["problem"]["code"] == "InvalidRequest"
    assert answer["problem"]["detail"] == "command: given more than once"


async def test_exec_works_in_an_adopted_kernel(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER, env={"V": "kept"})
    await daemon.restart(number=signal.SIGKILL)
    assert (await ran(client, "sh", "-c", "echo $V"))[1] == b"kept\n"


async def test_exec_works_from_the_command_line(daemon, client) -> None:
    await daemon.running(kernel_id="k1", command=SLEEPER)
    command = [str(Path(sys.executable).with_name("agentctl")), "--socket",
               str(daemon.folder / "agentd.sock"), "exec"]  # fmt: skip

    def run(*words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*command, *words], input=given, capture_output=True, check=False, timeout=60
        )

    done = await asyncio.to_thread(
        lambda: run("-i", "k1", "--", "sh", "-c", "cat; echo e >&2; exit 4", given=b"in")
    )
    assert (done.returncode, done.stdout, done.stderr) == (4, b"in", b"e\n")
    missing = await asyncio.to_thread(run, "k1", "--", "no-such-program")
    assert missing.returncode == 127
    assert b"CommandNotFound" in missing.stderr
    seen = await asyncio.to_thread(on_a_terminal, [*command, "-it", "k1", "--", "sh"])
    assert b"I am here" in seen


def on_a_terminal(command: list[str]) -> bytes:
    """Type a line into a command that runs on a terminal, and return what is seen."""
    pid, master = pty.fork()
    if pid == 0:
        os.execv(command[0], command)  # noqa: S606 - a program of ours
    os.write(master, b"echo I am $((1 * 1))here | tr -d 1; exit\r")
    seen = b""
    try:
        while chunk := os.read(master, 4096):
            seen += chunk
    except OSError:
        pass
    os.waitpid(pid, 0)
    os.close(master)
    return seen
