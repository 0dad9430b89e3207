"""Agents with means of their own on a real engine, as docs/how-to/teams-on-one-node.md has them."""

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from end_to_end.containers import inspected, printed
from support.daemon import Daemon
from support.engine import Engine, rootfs
from support.registry import Registry

pytestmark = pytest.mark.docker
TEAMS = """allowed-mounts = ["{folder}/public"]
[[agents]]
id = "team-a"
allowed-mounts = ["{folder}/a"]
registry-auth = "{folder}/a.json"
allowed-groups = [2000]
[[agents]]
id = "team-b"
"""


@pytest.fixture
async def private(folder: Path) -> AsyncIterator[str]:
    """An image of a registry that only team-a can log in to."""
    registry = Registry(login=("ada", "se:cret"))
    await registry.start()
    auth = base64.b64encode(b"ada:se:cret").decode()
    auths = {"auths": {f"127.0.0.1:{registry.port}": {"auth": auth}}}
    (folder / "a.json").write_text(json.dumps(auths))
    yield registry.image("private", rootfs())
    await registry.stop()


async def test_teams_meet_in_no_folder_and_use_their_own_logins(
    dockered: Daemon, engine: Engine, folder: Path, private: str
) -> None:
    for name in ("a", "public"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    await dockered.start(TEAMS.format(folder=folder))
    mounts = {n: [{"source": f"{folder}/{n}", "target": "/data"}] for n in ("a", "public")}
    refused = await dockered.create("team-b", image=private)
    assert refused.status != 201, refused.content
    kernel = await dockered.running("team-a", image=private, mounts=mounts["a"], groups=[2000])
    assert inspected(engine, kernel)["HostConfig"]["GroupAdd"] == ["2000"]
    for agent, name, groups in (("team-a", "public", [2000]), ("team-b", "a", [])):
        answer = await dockered.create(agent, mounts=mounts[name], groups=groups)
        assert [error["where"] for error in answer.json["errors"]] == ["mounts.0.source"]
    answer = await dockered.create("team-b", groups=[2000])
    assert [error["where"] for error in answer.json["errors"]] == ["groups.0"]
    await dockered.running("team-b", image=private)  # images belong to the engine
    asked = await dockered.create("team-b", image=private, pull_policy="always")
    assert asked.status != 201, asked.content
    assert "se:cret" not in dockered.log


async def test_reload_gives_a_team_another_folder(dockered: Daemon, folder: Path) -> None:
    for name in ("a", "b", "public"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    text = TEAMS.format(folder=folder)
    await dockered.start(text)
    mounts = [{"source": f"{folder}/b", "target": "/data"}]
    assert (await dockered.create("team-b", mounts=mounts)).status == 422
    dockered.configure(f'{text}allowed-mounts = ["{folder}/b"]\n')
    answer = await dockered.call("POST", "/v1/reload")
    assert (answer.status, answer.json) == (200, {"needs_restart": []})
    assert await printed(dockered, "cat /data/file", agent="team-b", mounts=mounts) == "b"
