from agentd.http.streaming import server_sent_events
from agentd.http.streaming.server_sent_events import EncodedEvents


def test_cache_of_events_has_a_bound_of_bytes(monkeypatch) -> None:
    monkeypatch.setattr(server_sent_events, "MAX_KEPT_BYTES", 10)
    cache, encoded = EncodedEvents(), list[int]()

    def event(number: int, size: int) -> bytes:
        def encode() -> bytes:
            encoded.append(number)
            return bytes(size)

        return cache.of(number, None, encode)

    for number, size in ((1, 4), (2, 6), (1, 4), (3, 1), (2, 6), (1, 4), (4, 99), (4, 99)):
        assert event(number, size) == bytes(size)
    assert encoded == [1, 2, 3, 1, 4, 4]
