from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleet.fleet_world import World


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    """A fleet of which nothing has been started."""
    made = World(folder)
    yield made
    await made.close()
