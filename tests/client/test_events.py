"""The client's parser of events, fed by any server."""

from collections.abc import AsyncIterator

import pytest

from agentd.client.stream_calls import _parse_events
from agentd.errors import Refused

EVENT = b'event: kernel\ndata: {"id": "k1"}\nid: 7\n\n'


async def parts(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.mark.parametrize("size", [1, 2, 7, len(EVENT), 1000])
async def test_events_are_the_same_however_they_are_cut(size: int) -> None:
    events = [event async for event in _parse_events(parts(EVENT * 3, size), 100)]
    assert [(event.kind, event.data, event.id) for event in events] == 3 * [
        ("kernel", {"id": "k1"}, "7")
    ]


async def test_endless_line_in_small_parts_takes_linear_time() -> None:
    """With a copy of the line for each part, this takes minutes."""
    with pytest.raises(Refused, match="an event exceeds 16777216 bytes"):
        async for _ in _parse_events(parts(b"x" * (17 << 20), 256), 16 << 20):
            pass
