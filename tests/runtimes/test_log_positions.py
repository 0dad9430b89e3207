"""Positions in logs of lines, from a log in memory whose head a test drops."""

import json
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from zlib import crc32

import pytest

from agentd.runtimes.log_positions import LogEntry, LogPositions
from agentd.services.protocols import LogQuery


class MemoryLog:
    """Lines with their times; `searches` if it finds the first line that is not older."""

    def __init__(self, *, searches: bool = True) -> None:
        self.searches = searches
        self.lines: list[tuple[str, bytes]] = []
        self.dropped = 0
        self.was_rotated = False
        self.reads = 0

    def print(self, *lines: bytes, time: int | None = None) -> None:
        for line in lines:
            at = len(self.lines) if time is None else time
            self.lines.append((f"{at:06d} {crc32(line):08x}", line))

    def drop(self, lines: int) -> None:
        self.dropped = lines
        self.was_rotated = True

    @property
    def output(self) -> bytes:
        return b"".join(line for _, line in self.lines)

    @property
    def kept_from(self) -> int:
        return len(b"".join(line for _, line in self.lines[: self.dropped]))

    async def read(self, query: LogQuery, begin: str = "") -> AsyncGenerator[Sequence[LogEntry]]:
        self.reads += 1
        kept = self.lines[self.dropped :]
        if query.since_ns:
            since = f"{query.since_ns:06d}"
            kept = [(key, line) for key, line in kept if key.partition(" ")[0] >= since]
        elif begin and self.searches:
            found = (n for n, (key, _) in enumerate(kept) if key[:6] >= begin[:6])
            kept = kept[next(found, len(kept)) :]
        for index in range(0, len(kept), 7):
            yield [LogEntry(key, line) for key, line in kept[index : index + 7]]

    async def is_whole(self) -> bool:
        return not self.was_rotated


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    monkeypatch.setattr("agentd.runtimes.log_positions.ANCHOR_BYTES", 20)
    return MemoryLog()


class Reader:
    """Reads of one log by daemons that are restarted between two of them."""

    def __init__(self, log: MemoryLog, folder: Path) -> None:
        folder.chmod(0o700)
        self._log, self.file = log, folder / "k1.positions.json"

    async def read(self, query: LogQuery, log_id: str = "first") -> tuple[int, bytes]:
        async with LogPositions().open(self._log, query, self.file, log_id) as opened:
            return opened.position, b"".join([chunk async for chunk in opened.chunks])


@pytest.fixture
def reader(log: MemoryLog, tmp_path: Path) -> Reader:
    return Reader(log, tmp_path)


LINES = [b"%d %s\n" % (n, b"x" * (n % 7)) for n in range(100)]


@pytest.mark.parametrize("dropped", [0, 1, 30, 99])
@pytest.mark.parametrize("ties", [1, 3], ids=["own times", "equal times"])
async def test_positions_are_exact_after_a_drop(log, reader, ties: int, dropped: int) -> None:
    for number, line in enumerate(LINES):
        log.print(line, time=number // ties)
    assert await reader.read(LogQuery()) == (0, log.output)
    log.drop(dropped // ties * ties)
    begin = log.kept_from
    end = len(log.output)
    for asked in (0, 5, begin - 1, begin, begin + 1, end // 2, end - 1, end, end + 1):
        position = min(max(asked, begin), end)
        assert await reader.read(LogQuery(from_position=max(0, asked))) == (
            position, log.output[position:]
        )  # fmt: skip
    assert await reader.read(LogQuery()) == (begin, log.output[begin:])
    if ties == 1:
        last = LINES[-1]
        assert await reader.read(LogQuery(tail=1)) == (end - len(last), last)
        assert await reader.read(LogQuery(since_ns=99)) == (end - len(last), last)
    assert await reader.read(LogQuery(tail=0)) == (end, b"")
    assert await reader.read(LogQuery(since_ns=1000)) == (end, b"")


async def test_forms_have_their_own_positions(log, reader) -> None:
    log.print(*LINES)
    await reader.read(LogQuery())
    log.drop(10)
    stamped = LogQuery(timestamps=True)
    position, content = await reader.read(stamped)
    assert position > 0, "it may have lost its head, and nobody has read it before"
    assert await reader.read(stamped) == (position, content)


async def test_unknown_head_is_never_read_in_silence(log, reader) -> None:
    log.print(*LINES)
    log.drop(10)
    position, content = await reader.read(LogQuery(from_position=50))
    assert position > 50
    assert content == log.output[log.kept_from :]
    again = LogQuery(from_position=position + 7)
    assert await reader.read(again) == (position + 7, content[7:])
    log.print(*LINES)
    log.drop(150)
    assert await reader.read(LogQuery(from_position=position)) > (position, b"")


async def test_all_that_was_noted_is_dropped(log, reader) -> None:
    log.print(*LINES)
    await reader.read(LogQuery())
    end = len(log.output)
    log.print(*LINES)
    log.drop(110)
    position, content = await reader.read(LogQuery(from_position=end))
    assert position > end, "whatever the follower has read, it is told of a loss"
    assert content == log.output[log.kept_from :]
    log.drop(200)
    assert (await reader.read(LogQuery(from_position=end)))[1] == b""
    log.print(b"later\n")
    position, content = await reader.read(LogQuery(from_position=end))
    assert (position > end, content) == (True, b"later\n")


async def test_line_that_is_dropped_while_it_is_read_is_told(log, reader, tmp_path: Path) -> None:
    log.print(*LINES)
    await reader.read(LogQuery())
    async with LogPositions().open(log, LogQuery(from_position=3), reader.file, "first") as opened:
        log.drop(50)
        with pytest.raises(Exception, match="was dropped"):
            await anext(opened.chunks)


async def test_log_of_another_kernel_has_other_positions(log, reader) -> None:
    log.print(*LINES)
    await reader.read(LogQuery())
    log.lines.clear()
    log.print(b"another\n")
    assert await reader.read(LogQuery(from_position=2), "second") == (2, b"other\n")


@pytest.mark.parametrize("dropped", [0, 10, 4000, 4980])
async def test_anchors_are_fewer_further_back(log, reader, dropped: int) -> None:
    log.print(*(b"%d\n" % n for n in range(5000)))
    assert (await reader.read(LogQuery())) == (0, log.output)
    (anchors,) = json.loads(reader.file.read_text())["anchors"].values()
    assert len(anchors) < 100
    log.drop(dropped)
    begin = log.kept_from
    asked = max(0, begin - 5)
    assert await reader.read(LogQuery(from_position=asked)) == (begin, log.output[begin:])


async def test_anchors_are_bounded(log, reader, monkeypatch) -> None:
    monkeypatch.setattr("agentd.runtimes.log_positions.MAX_ANCHORS", 5)
    log.print(*LINES)
    assert (await reader.read(LogQuery())) == (0, log.output)
    (anchors,) = json.loads(reader.file.read_text())["anchors"].values()
    assert 2 <= len(anchors) <= 5
    log.drop(50)
    begin = log.kept_from
    assert await reader.read(LogQuery()) == (begin, log.output[begin:])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"log_id": "first", "anchors": {"x": [1]}}'])
async def test_damaged_file_is_ignored(log, reader, content: str) -> None:
    log.print(*LINES)
    reader.file.write_text(content)
    assert await reader.read(LogQuery(from_position=9)) == (9, log.output[9:])


@pytest.mark.parametrize("searches", [True, False])
@pytest.mark.parametrize("dropped", [0, 1, 40, 90, 150])
async def test_clock_may_have_been_set_back(log, reader, dropped: int, *, searches: bool) -> None:
    log.searches = searches
    for begin in (1000, 900, 1050):
        for number, line in enumerate(LINES[:60]):
            log.print(line, time=begin + number)
    assert await reader.read(LogQuery()) == (0, log.output)
    log.drop(dropped)
    for asked in range(log.kept_from, len(log.output) + 1):
        assert await reader.read(LogQuery(from_position=asked)) == (asked, log.output[asked:])
    for lines in (1, 30, len(log.lines) - dropped):
        last = b"".join(line for _, line in log.lines[-lines:])
        query = LogQuery(tail=lines)
        assert await reader.read(query) == (len(log.output) - len(last), last)
    position, content = await reader.read(LogQuery(since_ns=1050))
    assert content == log.output[position:]


async def test_lines_of_one_time_are_counted_from_the_end(log, reader) -> None:
    log.print(*[b"tick\n"] * 1000, time=5)
    end = len(log.output)
    for lines in (1, 10, 1000, 1001):
        begin = max(0, end - 5 * lines)
        assert await reader.read(LogQuery(tail=lines)) == (begin, log.output[begin:])
        assert await reader.read(LogQuery(tail=lines, since_ns=5)) == (begin, log.output[begin:])


async def test_position_of_a_caller_is_not_counted_from(log, reader) -> None:
    log.print(*LINES)
    log.drop(10)
    asked = 10**30
    assert (await reader.read(LogQuery(from_position=asked)))[0] > asked
    position, content = await reader.read(LogQuery())
    assert position < 2**30
    assert await reader.read(LogQuery(from_position=position + 3)) == (position + 3, content[3:])


async def test_readers_that_come_together_count_alike(log, reader) -> None:
    positions = LogPositions()
    query = LogQuery(follow=True)
    async with (
        positions.open(log, query, reader.file, "first") as first,
        positions.open(log, query, reader.file, "first"),
    ):
        log.print(*LINES)
        assert b"".join([chunk async for chunk in first.chunks]) == log.output
    log.drop(50)
    begin = log.kept_from
    assert await reader.read(LogQuery(from_position=begin + 1)) == (
        begin + 1, log.output[begin + 1 :]
    )  # fmt: skip


async def test_random_drops_are_all_told(log, reader) -> None:
    """A follower that reads a part, goes away and returns has every byte, or hears of its loss."""
    chance = random.Random(58)
    position, seen = 0, b""
    for _ in range(60):
        log.print(*(b"%d\n" % chance.randrange(10**6) for _ in range(chance.randrange(9))))
        log.drop(min(len(log.lines), log.dropped + chance.choice([0, 0, 3])))
        log.was_rotated = bool(log.dropped)
        query = LogQuery(from_position=position, follow=True)
        async with LogPositions().open(log, query, reader.file, "first") as opened:
            if opened.position != position:
                assert opened.position > position
                assert log.kept_from > len(seen) or not log.output[log.kept_from :]
                return  # positions may be others from here on
            async with aclosing(opened.chunks) as chunks:
                async for chunk in chunks:
                    seen += chunk
                    if chance.random() < 0.2:
                        break
        position = len(seen)
        assert log.output.startswith(seen)
