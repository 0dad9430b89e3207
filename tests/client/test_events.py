"""The client's parser of events, fed by any server."""

import pytest

from agentd.client.events import EventParser
from agentd.errors import Refused

EVENT = b'event: kernel\ndata: {"id": "k1"}\nid: 7\n\n'


@pytest.mark.parametrize("size", [1, 2, 7, len(EVENT), 1000])
def test_events_are_the_same_however_they_are_cut(size: int) -> None:
    content, parser = EVENT * 3, EventParser(100)
    parts = [content[start : start + size] for start in range(0, len(content), size)]
    events = [event for part in parts for event in parser.parse(part)]
    assert [(event.kind, event.data, event.id) for event in events] == 3 * [
        ("kernel", {"id": "k1"}, "7")
    ]


def test_endless_line_in_small_parts_takes_linear_time() -> None:
    """With a copy of the line for each part, this takes minutes."""
    parser = EventParser(16 << 20)
    parts = (event for _ in range((17 << 20) // 256) for event in parser.parse(b"x" * 256))
    with pytest.raises(Refused, match="an event exceeds 16777216 bytes"):
        next(parts)
