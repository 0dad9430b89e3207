import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from end_to_end.fleet.fleet_world import Pool, World


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
    """A fleet of which nothing has been started."""
    made = World(folder, pool)
    yield made
    await made.close()
