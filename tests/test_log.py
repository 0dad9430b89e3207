"""The log never raises into its caller: what cannot be written or rendered is counted."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from agentd import log as module
from agentd.log import Journal, configure, journal_entry
from agentd.stderr import NO_READER, LostLines


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__


class Broken:
    """A stream that fails while it is told to."""

    error: BaseException | None = None

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None:
        if self.error is not None:
            raise self.error
        self.text += text

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> LostLines:
    made = LostLines()
    monkeypatch.setattr(module, "LOST", made)
    return made


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch, lost: LostLines) -> Iterator[Broken]:
    """A log of JSON lines, and loggers that keep nothing of it afterwards."""
    made = Broken()
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=made))
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    before = structlog.get_config()
    configure()
    structlog.configure(cache_logger_on_first_use=False)
    monkeypatch.setattr(module, "log", structlog.get_logger())
    yield made
    structlog.configure(**before)


ERRORS = [
    BrokenPipeError(32, "Broken pipe"),
    BlockingIOError(11, "Resource temporarily unavailable"),
    OSError(28, "No space left on device"),
    ValueError("I/O operation on closed file"),
    UnicodeEncodeError("ascii", "é", 0, 1, "why"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_of_the_stream_stays_in_the_log(
    stream: Broken, lost: LostLines, error: Exception
) -> None:
    log = structlog.get_logger()
    stream.error = error
    log.info("node.warned", warning="one")
    try:
        raise LookupError
    except LookupError:
        log.exception("task.ended")
    assert (stream.text, lost.total) == ("", 2)
    stream.error = None
    lost.mark_writable()
    log.info("node.warned", warning="two")
    assert [event["event"] for event in stream.events] == ["node.warned", "log.lines_lost"]
    reason = f"task.ended: {type(error).__name__}"
    assert stream.events[1]["level"] == "error"
    assert (stream.events[1]["lines"], stream.events[1]["reason"]) == (2, reason)


@pytest.mark.parametrize("renderer", ["json", "journal"])
def test_value_without_a_text_is_a_lost_line(
    stream: Broken, lost: LostLines, monkeypatch: pytest.MonkeyPatch, renderer: str
) -> None:
    if renderer == "journal":
        monkeypatch.setattr(module, "_is_journal", lambda _: True)
        configure()
        structlog.configure(cache_logger_on_first_use=False)
    structlog.get_logger().info("node.warned", warning=Unprintable())
    assert lost.total == 1
    assert "node.warned: RuntimeError" in lost.problems()[0][0]


def fields(text: str) -> dict[str, str]:
    return journal_entry(None, "info", {"event": "node.warned", "warning": text})


def test_journal_without_a_socket_is_printed(
    stream: Broken, lost: LostLines, tmp_path: Path
) -> None:
    Journal(str(tmp_path / "none")).send(fields("why"))
    assert (stream.text, lost.total) == ("node.warned warning=why\n", 0)


def test_journal_that_is_busy_loses_and_reports(lost: LostLines, tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(path)
        journal = Journal(path)
        for _ in range(10_000):
            journal.send(fields("why"))
            if lost.total:
                break
        assert lost.total == 1
        assert NO_READER in lost.problems()[0][0]
        journald.recv(1 << 16)
        journal.send(fields("again"))
    found: list[int] = []
    lost.report(lambda lines, _: found.append(lines))
    assert found == [1]
