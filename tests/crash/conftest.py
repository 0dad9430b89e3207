import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.checked_node import NODE, CheckedNode
from support.daemon import Daemon
from support.engine import NEEDS, Engine
from support.needs import require


@pytest.fixture(params=["process", pytest.param("docker", marks=pytest.mark.docker)])
async def node(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[CheckedNode]:
    """A node on either runtime; started where the test is marked `started`."""
    engine = request.getfixturevalue("engine") if request.param == "docker" else None
    async for made in _node(request, Daemon(folder, request.param, engine)):
        yield made


@pytest.fixture
async def process_node(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[CheckedNode]:
    """The same on the process runtime."""
    async for made in _node(request, Daemon(folder, "process")):
        yield made


async def _node(request: pytest.FixtureRequest, daemon: Daemon) -> AsyncIterator[CheckedNode]:
    made = CheckedNode(daemon)
    if request.node.get_closest_marker("started"):
        await made.start(text=NODE)
    yield made
    await made.daemon.close()


@pytest.fixture(scope="session")
def own_engine() -> Iterator[Engine]:
    """An engine that may be restarted; its containers outlive it."""
    require(*NEEDS)
    home = Path(tempfile.mkdtemp(prefix="agentd-engine-", dir="/tmp"))
    engine = Engine(home, own_containerd=True)
    engine.start()
    engine.import_image()
    yield engine
    engine.clean()
    engine.end()
    shutil.rmtree(home, ignore_errors=True)
