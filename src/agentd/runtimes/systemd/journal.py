"""Logs of systemd kernels, from the journal: lines with their times.

Lines are selected by the unit and its invocation, which journald records itself
(systemd.journal-fields(7), "Trusted Journal Fields"); fields that a sender writes prove nothing.
They are read with journalctl(1). The journal keeps lines, not bytes: an empty one is dropped, one
over `LineMax=` (48 KiB) is cut in two, and a NUL ends one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.log_positions import LogEntry
from agentd.runtimes.systemd.unit import namespace_name
from agentd.services.protocols import LogQuery

_MAX_BYTES, _CHUNK_BYTES = 16 << 20, 64 << 10
SYNC_TIMEOUT_S = 5.0
JOURNAL_FOLDERS = ("/var/log/journal", "/run/log/journal")
"""With a folder for each namespace (systemd-journald.service(8))."""


class JournalSource(msgspec.Struct, frozen=True):
    """The lines of one invocation of a unit; without an `agent_id`, in the user's journal."""

    unit: str
    invocation_id: str
    agent_id: str | None
    wait_ended: Callable[[], Awaitable[None]]
    """Returns when the unit has ended."""

    @property
    def journal(self) -> list[str]:
        """The options that select the journal."""
        if self.agent_id is None:
            return ["--user"]
        return [f"--namespace={namespace_name(self.agent_id)}"]

    @property
    def matches(self) -> list[str]:
        """The fields that a line must have."""
        field = "_SYSTEMD_USER_UNIT" if self.agent_id is None else "_SYSTEMD_UNIT"
        return [f"{field}={self.unit}", f"_SYSTEMD_INVOCATION_ID={self.invocation_id}"]

    async def read(self, query: LogQuery, begin: str = "") -> AsyncGenerator[Sequence[LogEntry]]:
        """Yield the requested lines; a followed log ends with the unit."""
        options = ["--lines=all"]
        if begin:
            options.append(f"--cursor={begin.partition(' ')[2]}")
        elif query.since_ns:
            microseconds = query.since_ns // 1000
            options.append(f"--since=@{microseconds // 10**6}.{microseconds % 10**6:06d}")
        if query.follow:
            async with aclosing(self._follow(options, query)) as followed:
                async for entries in followed:
                    options = [f"--after-cursor={entries[-1].key.partition(' ')[2]}", "--lines=all"]
                    yield entries
        await _flush(self)
        async with aclosing(_read_entries(self, options, query)) as remaining:
            async for entries in remaining:
                yield entries

    async def _follow(
        self, options: Sequence[str], query: LogQuery
    ) -> AsyncGenerator[Sequence[LogEntry]]:
        """Yield lines until the unit has ended; the last ones may be missing."""
        entries = _read_entries(self, [*options, "--follow"], query)
        end_task = asyncio.ensure_future(self.wait_ended())
        try:
            while True:
                next_entry = asyncio.ensure_future(anext(entries, None))
                try:
                    await asyncio.wait({next_entry, end_task}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not next_entry.done():
                        next_entry.cancel()
                        await asyncio.wait([next_entry])
                if next_entry.cancelled() or (entry := next_entry.result()) is None:
                    break
                yield entry
            if not end_task.done():
                raise RuntimeUnavailable("journalctl ended before the kernel")
        finally:
            end_task.cancel()
            await entries.aclose()

    async def is_whole(self) -> bool:
        """Return whether the journal has dropped no line here, as far as older ones tell.

        journald drops whole files, the oldest of the archived ones first, and keeps the lines of
        each user in files of their own: an older line of another user tells nothing of those.
        """
        own = await self._oldest(self.matches)
        if own is None:
            return True
        if await self._oldest([f"_UID={own.get('_UID')}"]) not in (None, own):
            return True
        return await self._oldest([]) not in (None, own) and not self._has_archived(own)

    def _has_archived(self, record: Mapping[str, object]) -> bool:
        """Return whether there are older files of the user of a line, or may be."""
        namespace = "" if self.agent_id is None else f".{namespace_name(self.agent_id)}"
        pattern = f"*{namespace}/user-{record.get('_UID')}@*"
        return any(any(Path(folder).glob(pattern)) for folder in JOURNAL_FOLDERS)

    async def _oldest(self, matches: Sequence[str]) -> Mapping[str, object] | None:
        async with aclosing(_read_records(self, ["--lines=all", *matches])) as records:
            first = await anext(records, None)
        return first[0] if first else None


async def _read_entries(
    source: JournalSource, options: Sequence[str], query: LogQuery
) -> AsyncGenerator[Sequence[LogEntry]]:
    async with aclosing(_read_records(source, [*options, *source.matches])) as batches:
        async for records in batches:
            yield [
                LogEntry(
                    f"{record['__REALTIME_TIMESTAMP']:>020} {record['__CURSOR']}",
                    _format_line(record, query),
                )
                for record in records
            ]


async def _read_records(
    source: JournalSource, options: Sequence[str]
) -> AsyncGenerator[Sequence[Mapping[str, object]]]:
    command = ["journalctl", "--quiet", "--no-pager", "--all", "--output=json",
               "--output-fields=MESSAGE,_UID", *source.journal, *options]  # fmt: skip
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise RuntimeUnavailable(f"journalctl: {error.strerror}") from error
    try:
        assert process.stdout is not None  # noqa: S101 - it was requested
        unread = b""
        while chunk := await process.stdout.read(_CHUNK_BYTES):
            *lines, unread = (unread + chunk).split(b"\n")
            if len(unread) > _MAX_BYTES:
                raise RuntimeUnavailable("endless line in the output of journalctl")
            if lines:
                yield [json.loads(line) for line in lines]
        if status := await process.wait():  # such as a file that was vacuumed while it was read
            raise RuntimeUnavailable(f"journalctl failed with status {status}")
    except ValueError as error:
        raise RuntimeUnavailable(f"malformed output of journalctl: {error}") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _format_line(entry: Mapping[str, object], query: LogQuery) -> bytes:
    """Return a line as it was printed, after its time if requested."""
    message = entry.get("MESSAGE")
    text = str(message or "").encode()
    if isinstance(message, list):  # bytes that are not text, or several fields of that name
        is_raw = all(isinstance(item, int) for item in message)
        text = bytes(message) if is_raw else " ".join(map(str, message)).encode()
    if not query.timestamps:
        return text + b"\n"
    timestamp = datetime.fromtimestamp(int(str(entry["__REALTIME_TIMESTAMP"])) / 1e6, UTC)
    return f"{timestamp:%Y-%m-%dT%H:%M:%S.%f}Z ".encode() + text + b"\n"


async def _flush(source: JournalSource) -> None:
    """Flush the journal, which only root may request."""
    if source.agent_id is None:
        return
    with suppress(OSError, TimeoutError):
        process = await asyncio.create_subprocess_exec(
            "journalctl",
            "--sync",
            *source.journal,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(SYNC_TIMEOUT_S):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
