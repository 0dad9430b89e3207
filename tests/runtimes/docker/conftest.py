from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.runtimes.docker.docker_client import DockerClient
from runtimes.docker.fake_engine import FakeEngine


@pytest.fixture
async def fake_engine(folder: Path) -> AsyncIterator[FakeEngine]:
    made = FakeEngine(folder / "engine.sock")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(fake_engine: FakeEngine) -> AsyncIterator[DockerClient]:
    made = DockerClient(fake_engine.path)
    yield made
    await made.close()
