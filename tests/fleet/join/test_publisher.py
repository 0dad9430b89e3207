"""A publisher ends with an error when a part of it ends, for whatever reason."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentd.errors import DaemonFailed
from agentd_fleet.join.publisher import JoinOptions, Publisher, publish
from agentd_fleet.nodes.reader import NodeReader


def options(folder: Path) -> JoinOptions:
    return JoinOptions(
        fleet="f",
        endpoints=("http://127.0.0.1:1",),
        user="",
        password="",
        ca=None,
        cert=None,
        key=None,
        socket=str(folder / "none.sock"),
        url="",
        labels={},
        lease_s=2,
        state_dir=str(folder),
    )


async def returns(_: object) -> None: ...


async def raises(_: object) -> None:
    raise LookupError("no more")


async def is_cancelled(_: object) -> None:
    raise asyncio.CancelledError


async def goes_on(_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("work", "why"),
    [(returns, "returned"), (raises, "LookupError: no more"), (is_cancelled, "was cancelled")],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("ended", [Publisher, NodeReader])
async def test_publisher_fails_when_a_part_ends(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ended: type[Publisher] | type[NodeReader],
    work: Callable[[object], Awaitable[None]],
    why: str,
) -> None:
    for part in (Publisher, NodeReader):
        monkeypatch.setattr(part, "run", work if part is ended else goes_on)
    name = "publisher" if ended is Publisher else "reader"
    with pytest.raises(DaemonFailed, match=f"background task {name} ended: {why}"):
        async with asyncio.timeout(10):
            await publish(options(tmp_path))
