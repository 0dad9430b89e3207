from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentd.client import AsyncClient
from support.daemon import AGENTS, UNITS, Daemon, gpus
from support.engine import Engine
from support.engine_proxy import EngineProxy

ONE_GPU = AGENTS + gpus(1)
GRACE = {"agentd.services.kernels.pending_creates.UNRESOLVED_GRACE_S": 1.5}


@pytest.fixture(params=["process", *UNITS, pytest.param("docker", marks=pytest.mark.docker)])
async def daemon(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Daemon]:
    """agentd on each runtime, not started yet; its kernels are removed afterwards."""
    engine = request.getfixturevalue("engine") if request.param == "docker" else None
    made = Daemon(folder, request.param, engine)
    yield made
    await made.close()


@pytest.fixture
async def dockered(engine: Engine, folder: Path) -> AsyncIterator[Daemon]:
    """agentd on the docker runtime."""
    made = Daemon(folder, "docker", engine)
    yield made
    await made.close()


@pytest.fixture
async def plain(folder: Path) -> AsyncIterator[Daemon]:
    """agentd on the process runtime."""
    made = Daemon(folder, "process")
    yield made
    await made.close()


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    """A client of `daemon`, which runs by then."""
    async with AsyncClient(daemon.folder / "agentd.sock") as made:
        yield made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Any]:
    """One Chromium for all tests of a worker; they run in its event loop."""
    from end_to_end.browser import chromium  # the virtual machine has no Playwright

    async with chromium() as started:
        yield started


@pytest.fixture
async def proxied(engine: Engine, folder: Path) -> AsyncIterator[tuple[Daemon, EngineProxy]]:
    """agentd, and between it and the engine a proxy."""
    proxy = EngineProxy(folder / "proxy.sock", engine.socket)
    await proxy.start()
    made = Daemon(folder, "docker", engine)
    made.engine = proxy.path
    yield made, proxy
    proxy.clear()
    if not proxy.path.exists():
        await proxy.start()
    await made.close()
    await proxy.stop()


@pytest.fixture
async def one_gpu(
    proxied: tuple[Daemon, EngineProxy], engine: Engine
) -> tuple[Daemon, EngineProxy]:
    """agentd with one GPU behind the proxy; what the engine has is cleaned up first."""
    engine.clean()
    daemon, proxy = proxied
    daemon.deadlines = {**GRACE}
    await daemon.start(ONE_GPU)
    return daemon, proxy
