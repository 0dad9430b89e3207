"""A node's socket through which a test can lose answers, hold requests, or cut everything."""

import asyncio
import contextlib
from pathlib import Path


class NodeProxy:
    """Passes bytes on between a socket of its own and a node's."""

    def __init__(self, path: Path, node: Path) -> None:
        self.path, self.node = path, node
        self.passing = asyncio.Event()
        self.passing.set()
        self.asked = asyncio.Event()
        self.is_losing = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accepted, str(self.path))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            back, forth = await asyncio.open_unix_connection(str(self.node))
            try:
                await asyncio.gather(self._there(reader, forth), self._here(back, writer, reader))
            finally:
                forth.close()
                writer.close()

    async def _there(self, reader: asyncio.StreamReader, forth: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.asked.set()
            await self.passing.wait()
            forth.write(data)
        forth.write_eof()

    async def _here(
        self, back: asyncio.StreamReader, writer: asyncio.StreamWriter, ended: asyncio.StreamReader
    ) -> None:
        while data := await back.read(65536):
            if self.is_losing:
                writer.transport.abort()
                ended.feed_eof()
                return
            writer.write(data)
        writer.close()
        ended.feed_eof()
