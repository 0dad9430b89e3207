"""The connections that a stop waits for."""

import asyncio

from agentd.http.connections.admission import Newcomers


async def test_stop_waits_a_limited_time_for_accepted_clients() -> None:
    newcomers = Newcomers()
    await newcomers.heard(60)
    newcomers.add("asks")
    newcomers.add("hangs up")
    waiting = asyncio.create_task(newcomers.heard(60))
    for connection in ("asks", "hangs up"):
        await asyncio.sleep(0.01)
        assert not waiting.done()
        newcomers.discard(connection)
    async with asyncio.timeout(5):
        await waiting
    newcomers.add("says nothing")
    async with asyncio.timeout(5):
        await newcomers.heard(0.01)
