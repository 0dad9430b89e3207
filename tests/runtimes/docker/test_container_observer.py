"""A list that is given up is given up, also at the moment at which it would have ended."""

import asyncio
from typing import Any

import pytest

from runtimes.docker.test_ids import Lying, observer


class Late(Lying):
    """An engine that has no containers, and says so when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.get_running_loop().create_future()

    async def iterate_list(self, path: str, _: object) -> Any:
        await self.gate
        for item in ():
            yield item


@pytest.mark.parametrize("turns", range(8))
async def test_a_cancellation_is_never_lost_in_a_list(turns: int) -> None:
    """A daemon that stops would wait for ever for the loop that asked for the list."""
    engine = Late()
    listing = asyncio.create_task(observer(engine).list_kernels())
    for _ in range(4):
        await asyncio.sleep(0)
    engine.gate.set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    if listing.cancel():
        with pytest.raises(asyncio.CancelledError):
            await listing
