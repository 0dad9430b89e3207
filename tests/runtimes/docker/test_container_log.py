"""Logs of containers, by an engine that streams what a test has."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.docker.docker_streams import ContainerLog
from agentd.services.protocols import LogQuery


class StreamingDocker:
    """An engine whose only answers are a stream, and the options of a log."""

    def __init__(self, content: bytes, log: object = None, version: tuple[int, int] = (1, 42)):
        self._content, self._log, self._version = content, log, version
        self.params: dict[str, str] = {}

    async def fetch_api_version(self) -> tuple[int, ...]:
        return self._version

    async def call(self, method: str, path: str) -> object:
        return {"HostConfig": {"LogConfig": self._log} if self._log else {}}

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, params: dict[str, str]
    ) -> AsyncIterator[aiohttp.StreamReader]:
        self.params = params
        stream = aiohttp.StreamReader(BaseProtocol(None), 2**16)  # type: ignore[arg-type]
        stream.feed_data(self._content)
        stream.feed_eof()
        yield stream


def frame(second: int, text: str, number: int = 1) -> bytes:
    line = f"2026-11-21T12:00:{second:02d}.000000001Z {text}".encode()
    return bytes([number, 0, 0, 0]) + len(line).to_bytes(4, "big") + line


async def read(content: bytes, query: LogQuery) -> bytes:
    source = ContainerLog(StreamingDocker(content), "c1")  # type: ignore[arg-type]
    return b"".join([entry.data async for some in source.read(query) for entry in some])


LINES = [frame(n, f"{n}\n") for n in range(6)]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        pytest.param([*LINES[:4], *LINES[2:]], b"012345", id="an old engine has rotated a file"),
        pytest.param([*LINES[:4], *LINES[:4], *LINES[4:]], b"012345", id="all lines are repeated"),
        pytest.param([*LINES[3:], *LINES[:3]], b"345012", id="the clock was set back"),
        pytest.param([frame(1, "a"), frame(1, "b"), frame(1, "a")], b"aba", id="a long line"),
        pytest.param([frame(2, "a"), frame(1, "b", 2)], b"ab", id="streams out of order"),
    ],
)
async def test_followed_lines_are_given_once(frames: Sequence[bytes], expected: bytes) -> None:
    content = await read(b"".join(frames), LogQuery(follow=True))
    assert content.replace(b"\n", b"") == expected


async def test_lines_have_their_time_only_if_asked() -> None:
    line = LINES[0]
    assert await read(line, LogQuery()) == b"0\n"
    assert await read(line, LogQuery(timestamps=True)) == line[8:]


@pytest.mark.parametrize("cut", [1, 4, 8, 20])
async def test_cut_log_is_an_error(cut: int) -> None:
    with pytest.raises(RuntimeUnavailable, match="the engine cut the log off"):
        await read(LINES[0] + LINES[1][:cut], LogQuery())


@pytest.mark.parametrize(
    ("time", "minor", "since"),
    [
        ("2023-11-14T22:13:20.123456789Z", 42, "1700000000.123456789"),
        ("2023-11-14T23:13:20.5+01:00", 44, "1700000000.500000000"),
        ("2023-11-14T22:13:20Z", 42, "1700000000.000000000"),
        ("never", 42, "0.000000000"),
        ("2023-11-14T22:13:20Z", 41, "0.000000000"),
    ],
)
async def test_log_is_read_from_the_time_of_a_line(time: str, minor: int, since: str) -> None:
    """Engines with an older API leave out every line that is older than `since`."""
    docker = StreamingDocker(b"", version=(1, minor))
    source = ContainerLog(docker, "c1")  # type: ignore[arg-type]
    assert [entry async for entry in source.read(LogQuery(), f"{time} 00000000")] == []
    assert docker.params["since"] == since


def local(**options: str) -> object:
    return {"Type": "local", "Config": {"max-" + key: value for key, value in options.items()}}


@pytest.mark.parametrize(
    ("log", "lines", "is_whole"),
    [
        pytest.param(None, 6, True, id="options of the driver"),
        pytest.param(local(size="300", file="2"), 6, True, id="smaller than one file"),
        pytest.param(local(size="100", file="2"), 6, False, id="as large as one file"),
        pytest.param(local(size="100", file="5"), 6, True, id="smaller than four files"),
        pytest.param(local(size="9000", file="1"), 1, False, id="one file is kept"),
        pytest.param(local(size="9000", file="1"), 0, True, id="nothing was printed"),
        pytest.param(local(size="9k"), 1, False, id="options of another tool"),
        pytest.param({"Type": "k8s-file", "Config": None}, 1, False, id="Podman"),
    ],
)
async def test_log_is_whole_if_its_options_say_so(log: object, lines: int, is_whole: bool) -> None:
    docker = StreamingDocker(b"".join(LINES[:lines]), log)
    source = ContainerLog(docker, "c1")  # type: ignore[arg-type]
    assert await source.is_whole() == is_whole
