"""agentd, counting what it serves of each caller between the arrival of a `/livez` and its answer.

    AGENTD_COUNTS=FILE python tests/hostile/counting.py run --config agent.toml

Appends a line to FILE for each `PROBE`: the most that was served of one other caller meanwhile, by
kind; and a line for each event that is encoded: its id.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from agentd.cli.agentd.main import agentd
from agentd.http.connections.connection import Connection
from agentd.http.connections.fair import FairConnection
from agentd.http.connections.turns import Kind
from agentd.rpc import events

served: Counter[tuple[Hashable, str]] = Counter()
"""By caller and kind, since the start; bytes that were read, and all else by numbers."""
arrived: dict[FairConnection, Counter[tuple[Hashable, str]]] = {}
PROBE = b"GET /livez HTTP/1.1\r\nHost: counted\r\n\r\n"


def count(file: Path) -> None:
    """Count from now on."""
    updated, turn = FairConnection.buffer_updated, FairConnection.turn
    encode = events.encode_event
    received, began, ended = Connection.data_received, Connection.began, Connection.ended

    def buffer_updated(self: Connection, nbytes: int) -> None:
        if bytes(self.get_buffer(-1)[:nbytes]) == PROBE:
            arrived[self] = served.copy()
        updated(self, nbytes)

    def data_received(self: Connection, data: bytes) -> None:
        if self not in arrived:
            served[self._caller, "bytes"] += len(data)
        received(self, data)

    async def counted_turn(self: Connection, kind: Kind, amount: int = 1) -> None:
        await turn(self, kind, amount)
        if kind is Kind.FRAMES:
            served[self._caller, "frames"] += amount

    async def counted_began(self: Connection, *arguments: Any) -> None:
        await began(self, *arguments)
        if self not in arrived:
            served[self._caller, "requests"] += 1

    def counted_ended(self: Connection) -> None:
        ended(self)
        if (before := arrived.pop(self, None)) is not None:
            most: dict[str, int] = {}
            for (_, kind), number in (served - before).items():
                most[kind] = max(number, most.get(kind, 0))
            with file.open("a") as lines:
                lines.write(json.dumps(most) + "\n")

    def counted_encode(event_id: str, *content: Any) -> bytes:
        with file.open("a") as lines:
            lines.write(json.dumps(event_id) + "\n")
        return encode(event_id, *content)

    events.encode_event = counted_encode
    FairConnection.buffer_updated = buffer_updated
    FairConnection.turn = counted_turn
    Connection.data_received = data_received
    Connection.began = counted_began
    Connection.ended = counted_ended


if __name__ == "__main__":
    count(Path(os.environ["AGENTD_COUNTS"]))
    agentd(prog_name="agentd")
