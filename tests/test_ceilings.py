"""Ceilings of what a daemon asks of the disk, of Linux and of the engine, whatever else is there.

They guard growth. Times are measured in `benchmarks/`. The daemon was started cold, over the engine
of `benchmarks/stand_in.py`, without event readers.
"""

import json
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.daemon import AGENTS, Daemon, gpus
from support.engine import stub_engine
from support.waiting import until

COUNTED = Path(__file__).parent / "support" / "count_syscalls.py"
PAIRS, KERNELS, CLAIMS = 50, 20, 50
ENGINE_CALLS = {"create": 1, "start": 1, "inspect": 3, "stop": 1, "remove": 1}
"""Of one create with its delete, which inspects after the stop, and after the events of both."""
MOST_FILES = 2
"""Of one create with its delete: the record of the kernel, which is then renamed, and the line
about the removal; without fsync, as the engine holds the truth."""
MOST_OTHER_FILES = 5
"""Of the node itself, meanwhile."""
MOST_LOOKS = 3
"""At each process: for helpers of plugins of an earlier daemon, for those of a plugin that ended,
and for commands that an earlier daemon left in containers."""
MOST_START_FILES, MOST_START_FSYNCS = 12, 8
"""Of a start: locks, the node and its runtimes, the inventory, what is served, the socket."""

Call = tuple[str, str, Any, int]
"""A method, a path, a body, and the status of the answer."""
SMALL = {"image": "any:1", "command": ["sleep", "1000"], "slots": {"cpu": 0, "mem": "16m"}}


class Counted(Daemon):
    """A daemon that counts, and a connection to it that is kept."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "docker")
        self.engine = folder / "engine.sock"
        (folder / "counts").mkdir()
        self._file = folder / "counts" / "counts.json"
        self.program = (str(COUNTED), str(self._file))

    async def counts(self) -> Any:
        """Return the counts so far."""
        self._file.unlink(missing_ok=True)
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR1)
        await until(self._file.exists)
        return json.loads(self._file.read_text())

    async def engine_calls(self) -> Any:
        """Return what the engine was asked for since the last call of this."""
        connector = aiohttp.UnixConnector(str(self.engine))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get("http://engine/counted") as response,
        ):
            return await response.json()

    async def calls(self, calls: Iterable[Call]) -> None:
        """Make calls one after the other, over one connection."""
        connector = aiohttp.UnixConnector(str(self.folder / "agentd.sock"))
        async with aiohttp.ClientSession("http://agentd", connector=connector) as session:
            for method, path, body, status in calls:
                async with session.request(method, path, json=body) as response:
                    assert response.status == status, await response.text()


def create(name: str) -> Call:
    return "POST", "/v1/agents/agent-1/kernels", {"kernel_id": name, **SMALL}, 201


def create_and_delete(name: str) -> list[Call]:
    return [create(name), ("DELETE", f"/v1/kernels/{name}?timeout=0", None, 204)]


def claim_and_release(name: str) -> list[Call]:
    body = {"claim_id": name, "holder": {"name": "x"}, "slots": {"cuda.device": 1}}
    path = "/v1/agents/agent-1/claims"
    return [("POST", path, body, 201), ("DELETE", f"/v1/claims/{name}", None, 204)]


@asynccontextmanager
async def counted(folder: Path) -> AsyncIterator[Counted]:
    with stub_engine(folder / "engine.sock"):
        daemon = Counted(folder)
        try:
            await daemon.start(AGENTS + gpus())
            yield daemon
        finally:
            await daemon.stop()
            daemon.notes.close()


@pytest.mark.long
async def test_create_with_delete_stays_below_its_ceilings(tmp_path: Path) -> None:
    async with counted(tmp_path) as daemon:
        await daemon.calls(create_and_delete("warm"))
        await daemon.engine_calls()
        before = await daemon.counts()
        await daemon.calls(c for n in range(PAIRS) for c in create_and_delete(f"k{n}"))
        after = await daemon.counts()
        asked = await daemon.engine_calls()
    assert after["fsyncs"] == before["fsyncs"]
    assert after["files"] - before["files"] <= MOST_FILES * PAIRS + MOST_OTHER_FILES
    assert asked.keys() == ENGINE_CALLS.keys()
    for name, count in ENGINE_CALLS.items():
        assert asked[name] <= count * (PAIRS + 1), name  # the last inspect of the first may be late


async def test_claim_with_release_stays_below_its_ceilings(tmp_path: Path) -> None:
    async with counted(tmp_path) as daemon:
        await daemon.calls(claim_and_release("warm"))
        before = await daemon.counts()
        await daemon.calls(c for n in range(PAIRS) for c in claim_and_release(f"c{n}"))
        after = await daemon.counts()
    assert after["fsyncs"] == before["fsyncs"]
    assert after["files"] - before["files"] <= PAIRS + MOST_OTHER_FILES


async def test_start_costs_the_same_reads_with_many_kernels(tmp_path: Path) -> None:
    async with counted(tmp_path) as daemon:
        empty = await daemon.counts()
        await daemon.calls(create(f"k{n}") for n in range(KERNELS))
        await daemon.engine_calls()
        await daemon.restart()
        asked = await daemon.engine_calls()
        full = await daemon.counts()
        assert len(await daemon.get("/v1/kernels")) == KERNELS
    assert asked == {"version": 2, "info": 1, "events": 1, "list": 1, "inspect": KERNELS}
    for name in ("stat", "environ", "cgroup"):
        of_any_process = f"/proc/1/{name}"
        looks = full["opened"].get(of_any_process, 0)
        assert looks == empty["opened"].get(of_any_process, 0)
        assert looks <= MOST_LOOKS
    assert full["files"] <= MOST_START_FILES
    assert full["fsyncs"] <= MOST_START_FSYNCS


async def test_start_reads_each_claim_once(tmp_path: Path) -> None:
    async with counted(tmp_path) as daemon:
        await daemon.restart()
        empty = await daemon.counts()
        body = {"holder": {"name": "x"}, "slots": {"mem": "1m"}}
        await daemon.calls([("POST", "/v1/agents/agent-1/claims", body, 201)] * CLAIMS)
        await daemon.restart()
        full = await daemon.counts()
        assert len(await daemon.get("/v1/claims")) == CLAIMS
    assert (full["files"], full["fsyncs"]) == (empty["files"], empty["fsyncs"])
    records = [path for path in full["opened"] if "/state/claims/" in path]
    assert len(records) == CLAIMS
    assert all(full["opened"][path] == 1 for path in records)
