"""Fixtures of the tests of the plugin host."""

from collections.abc import AsyncIterator

import pytest

from pluginhost.rig import Hosts


@pytest.fixture
async def host() -> AsyncIterator[Hosts]:
    made = Hosts()
    yield made
    for each in made.made:
        await each.close()
