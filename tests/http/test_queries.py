"""Parts of a request that must arrive in time."""

import asyncio
from unittest.mock import Mock

import pytest

from agentd.errors import RequestTimeout
from agentd.http import queries


class Slow(dict):
    """A request whose body does not come."""

    content = Mock(**{"is_eof.return_value": False})

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""


async def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert queries.BODY_TIMEOUT_S == 30
    monkeypatch.setattr(queries, "BODY_TIMEOUT_S", 0.05)
    with pytest.raises(RequestTimeout, match="the body did not come"):
        await queries.body_of(Slow())  # type: ignore[arg-type]
