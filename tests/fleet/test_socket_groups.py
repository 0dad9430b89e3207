"""Groups of a gateway's sockets: looked up beside its event loop, which signals need."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from agentd.concurrency import silent_subjects
from agentd.core.access import Caller, Role
from agentd.errors import RuntimeUnavailable, StartRefused
from agentd.http.server import Endpoint, UnixSocket
from agentd.program.name_service import NameEntry
from agentd_fleet import daemon
from support.waiting import until_blocking

KNOWN = {"ops": NameEntry("ops", 7, 0)}


def endpoint(*groups: str | None) -> Endpoint:
    caller = Caller("x", Role.ADMIN)
    return Endpoint(tuple(UnixSocket(Path(f"/{group}"), group, caller) for group in groups))


async def test_known_groups_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "find_entry", lambda _, name: KNOWN.get(name))
    assert await daemon.find_socket_groups(endpoint("ops", None, "unknown")) == {"ops": 7}


@pytest.mark.parametrize("is_silent", [True, False])
async def test_silent_name_service_holds_up_no_signal(
    monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """The start ends after the time for an answer, and is tried again."""
    answered = threading.Event()

    def find(*_: Any) -> None:
        if not is_silent:
            raise RuntimeUnavailable("the name service does not answer")
        answered.wait(20)

    monkeypatch.setattr(daemon, "find_entry", find)
    monkeypatch.setattr("agentd.concurrency.ANSWER_TIMEOUT_S", 0.2)
    looking = asyncio.create_task(daemon.find_socket_groups(endpoint("ops")))
    signals = 0
    while not looking.done():
        await asyncio.sleep(0.01)
        signals += 1
    assert signals > 1 or not is_silent
    with pytest.raises(StartRefused, match="group 'ops' cannot be looked up: "):
        await looking
    answered.set()
    until_blocking(silent_subjects, [])
