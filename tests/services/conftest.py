from collections.abc import AsyncIterator

import pytest

from services.node import Rig, running


@pytest.fixture
async def rig() -> Rig:
    """A node of fakes that has been listed."""
    made = Rig()
    await made.relist()
    return made


@pytest.fixture
async def watched(rig: Rig) -> AsyncIterator[Rig]:
    """The same, with the reconciler's loops running."""
    async with running(rig):
        yield rig
