import asyncio

import pytest

from agentd.events import MAX_EVENTS, EventKind, EventLog, TooSlow


async def test_listener_that_lags_behind_is_dropped() -> None:
    events = EventLog()
    with events.subscribe(None) as listener:
        next_event = asyncio.ensure_future(anext(listener.follow(1)))
        await asyncio.sleep(0)
        for _ in range(MAX_EVENTS + 1):
            events.publish(EventKind.FREE, None)
        with pytest.raises(TooSlow):
            await next_event
