"""Logs from the journal, by a journalctl that prints what a test has."""

import asyncio
import json
from pathlib import Path

import pytest

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.systemd.journal import JournalSource, read_journal
from agentd.services.protocols import LogQuery

LINE = json.dumps({"__CURSOR": "c", "__REALTIME_TIMESTAMP": "1", "MESSAGE": "line"})
SOURCE = JournalSource("agentd-k1.service", "0" * 32, None)


@pytest.mark.parametrize("has_ended", [True, False])
async def test_follow_ends_with_the_kernel_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_ended: bool
) -> None:
    """journalctl never ends by itself while it follows."""
    program = tmp_path / "journalctl"
    program.write_text(f"#!/bin/sh\ncase $* in *--lines=1*) echo '{LINE}';; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    ended = asyncio.Event()
    if has_ended:
        ended.set()
    lines = read_journal(SOURCE, LogQuery(follow=True, tail=1), wait_ended=ended.wait)
    if has_ended:
        assert [entry.data async for entry in lines] == [b"line\n"]
        return
    assert (await anext(lines)).data == b"line\n"
    with pytest.raises(RuntimeUnavailable, match="journalctl ended before the kernel"):
        await anext(lines)
