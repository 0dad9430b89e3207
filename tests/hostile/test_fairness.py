"""The amount that one caller is served while a `/livez` waits, counted inside the daemon."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from daemon import AGENTS, BASE, Daemon, gpus
from daemon_pool import Serving
from hostile.attacks import FRAMES, SLEEP, Client
from hostile.counting import PROBE

HERE = Path(__file__).parent
PROBES = 60
MOST = {"frames": 64, "bytes": 64 * 1024, "requests": 1}
"""The goal: what may be served of one caller before a `/livez` is answered."""
SOCKETS = ("resize", "ping", "byte", "fragments")
REQUESTS = ("lists", "probes", "chunks", "header", "newcomers")


@pytest.fixture
async def daemon(folder: Path) -> AsyncIterator[Daemon]:
    """A daemon that counts, with a kernel, and a second socket for whom is counted."""
    made = Daemon(folder, "process")
    made.program = (str(HERE / "counting.py"),)
    team = f'[[rpc.sockets]]\npath = "{folder}/team.sock"\nrole = "admin"\n'
    made.configure(AGENTS + gpus(), BASE + team.replace("{", "{{").replace("}", "}}"))
    await made.start(AGENTD_COUNTS=str(folder / "counts"), PYTHONPATH=str(HERE.parent))
    try:
        await made.running(kernel_id="k1", command=["sleep", "100000"])
        yield made
    finally:
        await made.close()


@contextlib.contextmanager
def attacked(address: Path, name: str, connections: int) -> Iterator[None]:
    command = [sys.executable, HERE / "attacks.py", name, address]
    command += ["--connections", str(connections)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


def counted(daemon: Daemon) -> list[Any]:
    file = daemon.folder / "counts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def probe(daemon: Daemon) -> list[dict[str, int]]:
    """Ask `/livez` a number of times; return what was counted for each."""
    before = len(counted(daemon))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.folder / "agentd.sock"))
        for _ in range(PROBES):
            sock.sendall(PROBE)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    return counted(daemon)[before:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "connections"), [(SOCKETS, 1), (SOCKETS, 8), (REQUESTS, 1), (REQUESTS, 40)]
)
async def test_a_caller_is_served_one_turn_while_livez_waits(
    daemon: Daemon, names: Sequence[str], connections: int
) -> None:
    found: dict[str, dict[str, int]] = {}
    for name in names:
        with attacked(daemon.folder / "team.sock", name, connections):
            counts: list[dict[str, int]] = []
            async with asyncio.timeout(30):
                while not any(counts):  # a command takes a while to start
                    counts += await asyncio.to_thread(probe, daemon)
            counts += await asyncio.to_thread(probe, daemon)
        found[name] = {kind: max(c.get(kind, 0) for c in counts) for kind in MOST}
    print(found)
    assert not [
        (name, kind)
        for name, most in found.items()
        for kind, ceiling in MOST.items()
        if most[kind] > ceiling
    ]


async def test_an_event_is_encoded_once_for_readers_that_see_the_same(daemon: Daemon) -> None:
    connector = aiohttp.UnixConnector(str(daemon.folder / "team.sock"), limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, AsyncExitStack() as stack:
        readers = [
            await stack.enter_async_context(session.get("http://x/v1/events")) for _ in range(30)
        ]
        for reader in readers:
            assert await reader.content.readline() == b": agentd\n"
        await daemon.call("POST", "/v1/devices/cuda/cuda0/drain")
        await daemon.call("POST", "/v1/devices/cuda/cuda0/undrain")
        seen = []
        async with asyncio.timeout(20):
            for reader in readers:
                ids = []
                while len(ids) < 2:
                    line = await reader.content.readline()
                    ids += [line[4:-1].decode()] if line.startswith(b"id: ") else []
                seen.append(ids)
    assert seen == [seen[0]] * 30
    encoded = counted(daemon)
    assert [encoded.count(event_id) for event_id in seen[0]] == [1, 1]


@pytest.mark.parametrize("name", ["resize", "signal", "stdin-closed", "ping", "pong", "empty"])
async def test_a_flood_of_control_frames_is_cut_off(serving_process: Serving, name: str) -> None:
    daemon = await serving_process()
    await daemon.running(kernel_id="k1", command=["sleep", "100000"])
    reader, writer = await asyncio.open_unix_connection(str(daemon.folder / "agentd.sock"))
    writer.writelines(islice(Client("").socket(SLEEP, FRAMES[name]), 3))
    policy_violation = (1008).to_bytes(2, "big")
    async with asyncio.timeout(30):
        await reader.readuntil(policy_violation + b"more than 256 control frames in 1 s")
    writer.transport.abort()
