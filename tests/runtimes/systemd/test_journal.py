"""Logs from the journal, by a journalctl that prints what a test has."""

import asyncio
import json
from pathlib import Path

import pytest

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.log_positions import LogPositions
from agentd.runtimes.systemd.journal import JournalSource
from agentd.services.protocols import LogQuery

LINE = json.dumps({"__CURSOR": "c", "__REALTIME_TIMESTAMP": "1", "MESSAGE": "line"})


JOURNALCTL = """#!/bin/sh
first=1 lines=all
for option; do case $option in
    --cursor=*) first=${option#--cursor=};;
    --after-cursor=*) first=$((${option#--after-cursor=} + 1));;
    --lines=*) lines=${option#--lines=};;
    _UID=7) cat others; is_selected=1;;
    _*) is_selected=1;;
esac; done
[ "$is_selected" ] || cat system
[ "$lines" = all ] && lines=+1
awk -v first=$first "NR >= first && length" journal | tail -n $lines
"""
"""A journalctl whose cursors are the numbers of lines; vacuumed lines are empty."""


VACUUMS = {
    "files that begin with the kernel": ("", "", [], False),
    "an older line of its user": ("older", "", ["m/user-7@1.journal"], True),
    "the first line of its user": ("", "older", ["m/user-7.journal", "m/user-8@1.journal"], True),
    "the first line of its user that is kept": ("", "older", ["m/user-7@1.journal"], False),
}


@pytest.mark.parametrize("case", VACUUMS)
async def test_positions_survive_a_vacuum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    others, system, files, known = VACUUMS[case]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr("agentd.runtimes.systemd.journal.JOURNAL_FOLDERS", (str(tmp_path),))
    (tmp_path / "journalctl").write_text(JOURNALCTL)
    (tmp_path / "journalctl").chmod(0o755)
    entries = [
        json.dumps(
            {"__CURSOR": str(n), "__REALTIME_TIMESTAMP": str(100 + n), "_UID": "7"}
            | {"MESSAGE": str(n)}
        )
        for n in range(1, 10)
    ]
    older = {"__CURSOR": "0", "__REALTIME_TIMESTAMP": "1", "MESSAGE": others, "_UID": "7"}
    (tmp_path / "others").write_text(f"{json.dumps(older)}\n" if others else "")
    system_line = {**older, "MESSAGE": system, "_UID": "0"}
    (tmp_path / "system").write_text(f"{json.dumps(system_line)}\n" if system else "")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentd.runtimes.log_positions.ANCHOR_BYTES", 4)
    tmp_path.chmod(0o700)
    source = JournalSource("agentd-k1.service", "0" * 32, None, asyncio.Event().wait)

    async def read(query: LogQuery) -> tuple[int, bytes]:
        file = tmp_path / "positions.json"
        async with LogPositions().open(source, query, file, "run") as opened:
            return opened.position, b"".join([chunk async for chunk in opened.chunks])

    (tmp_path / "journal").write_text("\n".join(entries) + "\n")
    base, content = await read(LogQuery())
    assert (base == 0, content) == (known, b"1\n2\n3\n4\n5\n6\n7\n8\n9\n")
    assert await read(LogQuery(tail=2)) == (base + 14, b"8\n9\n")
    (tmp_path / "journal").write_text("\n".join(["", "", "", *entries[3:]]) + "\n")
    assert await read(LogQuery(from_position=base + 2)) == (base + 6, content[6:])
    assert await read(LogQuery(from_position=base + 9)) == (base + 9, content[9:])


async def test_journal_that_breaks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "journalctl"
    program.write_text(f"#!/bin/sh\necho '{LINE}'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    source = JournalSource("agentd-k1.service", "0" * 32, None, asyncio.Event().wait)
    lines = source.read(LogQuery())
    assert (await anext(lines))[0].data == b"line\n"
    with pytest.raises(RuntimeUnavailable, match="journalctl failed with status 1"):
        await anext(lines)


@pytest.mark.parametrize("has_ended", [True, False])
async def test_follow_ends_with_the_kernel_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_ended: bool
) -> None:
    """journalctl never ends by itself while it follows."""
    program = tmp_path / "journalctl"
    program.write_text(f"#!/bin/sh\ncase $* in *--after-cursor=*) ;; *) echo '{LINE}';; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    ended = asyncio.Event()
    if has_ended:
        ended.set()
    source = JournalSource("agentd-k1.service", "0" * 32, None, ended.wait)
    lines = source.read(LogQuery(follow=True))
    if has_ended:
        assert [entry.data async for some in lines for entry in some] == [b"line\n"]
        return
    assert (await anext(lines))[0].data == b"line\n"
    with pytest.raises(RuntimeUnavailable, match="journalctl ended before the kernel"):
        await anext(lines)
