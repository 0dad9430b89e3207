from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from daemon import UNITS, Daemon
from engine import Engine
from engine_proxy import EngineProxy


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
