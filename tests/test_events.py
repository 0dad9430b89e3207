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


async def test_log_keeps_the_last_events_of_all() -> None:
    events = EventLog()
    events.publish(EventKind.FREE, "one team's")
    first = events.event_id(events._past[0])
    for number in range(MAX_EVENTS):
        events.publish(EventKind.FREE, number)
    for last_id, kind in ((first, EventKind.FREE), (first.replace("-1", "-0"), EventKind.RESET)):
        with events.subscribe(last_id) as listener:
            event = await anext(listener.follow(1))
            assert event is not None
            assert event.kind is kind
