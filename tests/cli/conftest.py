from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.daemon import Daemon


@pytest.fixture
async def up(folder: Path) -> AsyncIterator[Daemon]:
    """A daemon with the process runtime and the default configuration."""
    made = Daemon(folder, "process")
    await made.start()
    yield made
    await made.close()
