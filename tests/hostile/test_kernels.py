"""The attack suite: what a kernel tries against the daemon, its shim, its log and other kernels."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.checked_node import start_time
from support.daemon import AGENTS, Daemon, gpus
from support.waiting import until

NODE = (
    '[runtime.process]\nlog-max-size = "64k"\nlog-max-files = 2\n'
    "pids-limit = 64\nstop-timeout = 1\n"
    '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(4)
)
ANSWERS_WITHIN_S = 5.0


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[Daemon]:
    """A node on the process runtime, with small limits."""
    made = Daemon(folder, "process")
    await made.start(NODE)
    yield made
    await made.close()


async def quickly(daemon: Daemon, path: str) -> Any:
    async with asyncio.timeout(ANSWERS_WITHIN_S):
        return await daemon.call("GET", path)


def python(script: str) -> list[str]:
    return [os.path.realpath("/usr/bin/python3"), "-c", script]


SPARSE = {
    "truncates its output": "import os; os.ftruncate(1, 1 << 40)",
    "seeks in its output": "import os; os.lseek(1, 1 << 40, 0); os.write(1, b'x')",
    "opens it again": "import os; f = os.open('/dev/stdout', os.O_RDWR); os.ftruncate(f, 1 << 40)",
    "opens it by its descriptor": "open('/proc/self/fd/1', 'r+b').truncate(1 << 40)",
}


@pytest.mark.parametrize("name", SPARSE)
async def test_a_kernel_cannot_make_its_log_sparse(node: Daemon, folder: Path, name: str) -> None:
    script = f"try:\n  {SPARSE[name]}\nexcept OSError as e: print(type(e).__name__, flush=True)"
    assert (await node.create(kernel_id="k1", command=python(script))).status == 201
    await node.until("k1", "terminated")
    logs = folder.glob("state/kernels/k1/output.log*")
    assert sum(path.stat().st_size for path in logs) < 4096
    assert (await quickly(node, "/v1/kernels/k1/logs?tail=10")).status == 200


@pytest.mark.parametrize("what", ["yes 0123456789abcde", "cat /dev/zero", "yes '' "])
async def test_endless_log_is_bounded(node, folder, what) -> None:
    for number in range(2):
        await node.running(kernel_id=f"k{number}", command=["sh", "-c", what])
    following = asyncio.create_task(followed(node, "k0", 1 << 20))
    for _ in range(20):
        assert (await quickly(node, "/livez")).status == 200
        tail = await quickly(node, "/v1/kernels/k1/logs?tail=10")
        assert len(tail.content) <= 2 * 65536
    assert await following >= 1 << 20
    for number in range(2):
        stopped = await node.call("POST", f"/v1/kernels/k{number}/stop", {"timeout": 0})
        assert stopped.json["exit_code"] == 137
        logs = folder.glob(f"state/kernels/k{number}/output.log*")
        assert sum(path.stat().st_size for path in logs) <= 2 * 65536


async def followed(daemon: Daemon, kernel_id: str, wanted: int) -> int:
    """Follow a log until so many bytes have come, and hang up."""
    connector = aiohttp.UnixConnector(str(daemon.folder / "agentd.sock"))
    url = f"http://agentd/v1/kernels/{kernel_id}/logs?follow=true&from="
    seen = position = 0
    async with aiohttp.ClientSession(connector=connector) as session:
        while seen < wanted:
            async with session.get(f"{url}{position}") as response:
                position = int(response.headers["Log-Position"])
                with suppress(aiohttp.ClientPayloadError):  # it was overtaken by a rotation
                    async for chunk in response.content.iter_any():
                        seen, position = seen + len(chunk), position + len(chunk)
                        if seen >= wanted:
                            break
                response.close()
    return seen


def descriptors(daemon: Daemon) -> list[str]:
    assert daemon.process is not None
    found = []
    for path in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        try:
            found.append(str(path.readlink()))
        except FileNotFoundError:
            continue
    return found


async def test_a_follower_that_hangs_up_leaves_nothing_open(node: Daemon) -> None:
    script = "while :; do echo line; sleep 0.1; done"
    await node.running(kernel_id="k1", command=["sh", "-c", script])
    before = len(descriptors(node))
    for _ in range(3):
        await asyncio.gather(*(followed(node, "k1", 1) for _ in range(20)))
    async with asyncio.timeout(20):
        while any("output.log" in name for name in descriptors(node)):
            await asyncio.sleep(0.05)
        while len(descriptors(node)) > before:
            await asyncio.sleep(0.05)


async def test_a_kernel_that_forks_without_end_meets_its_limit(node: Daemon) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    await node.running(kernel_id="k1", command=python(bomb))
    for _ in range(5):
        assert (await quickly(node, "/livez")).status == 200
    async with asyncio.timeout(30):
        answer = await node.call("DELETE", "/v1/kernels/k1?timeout=0")
    assert answer.status == 204


@pytest.mark.needs("root")
async def test_a_kernel_cannot_end_or_trace_its_shim(node: Daemon, folder: Path) -> None:
    """Where agentd is root, and kernels are somebody else."""
    script = (
        "import os, signal, ctypes\n"
        "shim = os.getppid()\n"
        "for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):\n"
        "  try: os.kill(shim, number); print('killed')\n"
        "  except PermissionError: print('refused')\n"
        "print(ctypes.CDLL(None).ptrace(16, shim, 0, 0))\n"
        "try: os.listdir(f'/proc/{shim}/fd'); print('seen')\n"
        "except PermissionError: print('refused')\n"
        "print(sorted(os.listdir('/proc/self/fd')), flush=True)\n"
    )
    assert (await node.create(kernel_id="k1", command=python(script))).status == 201
    ended = await node.until("k1", "terminated")
    assert ended["exit_code"] == 0
    lines = (await node.call("GET", "/v1/kernels/k1/logs")).content.decode().splitlines()
    assert lines[:5] == ["refused"] * 3 + ["-1", "refused"]
    assert lines[5] == "['0', '1', '2', '3']", "the kernel inherited a descriptor, such as the lock"


async def test_kernel_without_shim_is_charged_and_can_be_ended(node, folder) -> None:
    kernel = await node.running(kernel_id="k1", slots={"cuda.device": 1})
    identity = (folder / "state/kernels/k1/identity.json").read_text()
    shim = int(identity.partition('"shim_pid": ')[2].partition(",")[0])
    os.kill(shim, 9)
    await until(lambda: start_time(shim), 0)
    await node.restart(NODE)
    again = await node.get("/v1/kernels/k1")
    assert (again["state"], again["pid"]) == ("running", kernel["pid"])
    assert await node.free("cuda.device") == "3"
    assert (await node.call("DELETE", "/v1/kernels/k1?timeout=0")).status == 204
    assert not start_time(kernel["pid"])


async def test_exit_status_space_is_reserved_before_the_command(node, folder) -> None:
    await node.running(kernel_id="k1", command=["sleep", "1000"])
    reserved = folder / "state/kernels/k1/.exit.json"
    assert reserved.stat().st_blocks * 512 >= 4096


@pytest.mark.needs("root")
async def test_kernels_of_agents_with_users_of_their_own_do_not_meet(node: Daemon) -> None:
    agents = '[[agents]]\nid = "agent-1"\nuser = "daemon"\n[[agents]]\nid = "agent-2"\n'
    await node.restart('[plugins]\nallow = ["sim"]\n' + agents + gpus(2))
    victim = await node.running("agent-1", kernel_id="victim")
    assert "separation" not in victim["not_enforced"]
    script = (
        f"kill -9 {victim['pid']}; cat /proc/{victim['pid']}/environ; ls /proc/{victim['pid']}/fd"
    )
    made = await node.create("agent-2", kernel_id="attacker", command=["sh", "-c", script])
    assert made.status == 201
    ended = await node.until("attacker", "terminated")
    assert "separation" in ended["not_enforced"]
    assert ended["exit_code"] != 0
    assert start_time(victim["pid"])
    text = (await node.call("GET", "/v1/kernels/attacker/logs")).content
    assert b"AGENTD" not in text
