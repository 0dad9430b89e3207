"""A publisher ends with an error when a part of it ends, for whatever reason."""

import asyncio
from pathlib import Path

import pytest

from agentd.errors import DaemonFailed
from agentd_fleet.join.options import JoinOptions
from agentd_fleet.join.publisher import Publisher, publish
from agentd_fleet.nodes.reader import NodeReader


def options(folder: Path) -> JoinOptions:
    return JoinOptions(
        name="f",
        etcd=("http://127.0.0.1:1",),
        socket=str(folder / "none.sock"),
        lease=2,
        state_dir=str(folder),
    )


async def returns(_: object) -> None: ...


async def goes_on(_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("ended", "name"), [(Publisher, "publisher"), (NodeReader, "reader")])
async def test_publisher_fails_when_a_part_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: type, name: str
) -> None:
    for part in (Publisher, NodeReader):
        monkeypatch.setattr(part, "run", returns if part is ended else goes_on)
    with pytest.raises(DaemonFailed, match=f"background task {name} ended: returned"):
        async with asyncio.timeout(10):
            await publish(options(tmp_path))
