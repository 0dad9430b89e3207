"""Fixtures of all tests with the parts of a fleet, imported by the conftest of each folder."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from end_to_end.fleet.etcd_server import EtcdServers
from end_to_end.fleet.fleet_world import Pool, World
from end_to_end.fleet.network import SilentNameServer
from support.needs import require


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Daemons for all tests of fleets."""
    folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
    folder.chmod(0o755)
    made = Pool(folder)
    yield made
    asyncio.run(made.close())
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def world(folder: Path, pool: Pool) -> AsyncIterator[World]:
    """A fleet without any running part."""
    made = World(folder, pool)
    yield made
    await made.close()


@pytest.fixture
async def name_server(folder: Path) -> AsyncIterator[SilentNameServer]:
    """A name server that answers nothing."""
    require("root")
    made = SilentNameServer(folder)
    await made.start()
    yield made
    made.stop()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[list[EtcdServers]]:
    """Processes of a test, stopped after it."""
    started: list[EtcdServers] = []
    yield started
    for servers in started:
        await servers.stop()


@pytest.fixture
async def servers(pool: Pool) -> EtcdServers:
    """The member of all tests that leave it as it is."""
    return await pool.etcd()


@pytest.fixture
async def mortal(tmp_path: Path, running: list[EtcdServers]) -> EtcdServers:
    """A member for a test that kills, stops, compacts or locks it."""
    running.append(EtcdServers(tmp_path))
    await running[0].start()
    return running[0]
