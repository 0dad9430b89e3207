from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from daemon import Daemon


@pytest.fixture(params=["process", pytest.param("docker", marks=pytest.mark.docker)])
async def daemon(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Daemon]:
    """agentd on either runtime, not started yet; its kernels are removed afterwards."""
    engine = request.getfixturevalue("engine") if request.param == "docker" else None
    made = Daemon(folder, request.param, engine.socket if engine else None)
    made.test_engine = engine  # type: ignore[attr-defined]
    yield made
    await made.close()


@pytest.fixture
async def plain(folder: Path) -> AsyncIterator[Daemon]:
    """agentd on the process runtime."""
    made = Daemon(folder, "process")
    yield made
    await made.close()
