"""Records of older agentds are adopted; those of newer ones are left alone.

`tests/recorded` holds the files of each version for a running and an ended kernel. The tests put
real processes and containers under those records, as that version left them.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentd.core.kernel.record import SCHEMA
from daemon import AGENTS, Daemon, gpus
from engine import Engine
from world import World, started

ONE_AT_A_TIME = pytest.mark.xdist_group("recorded")
"""The node ids are those that were recorded."""
RECORDED = Path(__file__).parents[1] / "recorded"
VERSIONS = sorted(path.stem for path in RECORDED.glob("*.json"))
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_there_is_something_recorded() -> None:
    assert VERSIONS


@pytest.fixture(params=VERSIONS)
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The files of one version."""
    return json.loads((RECORDED / f"{request.param}.json").read_text())


@pytest.fixture
def left_behind(folder: Path, recorded: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The state folder of that version, with a process under the record of the one that runs."""
    content, state = recorded["process"], folder / "state"
    for name, text in content["files"].items():
        path = state / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text)
    state.chmod(0o711)
    lives = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    identity = state / "kernels" / "lives" / "identity.json"
    who = json.loads(identity.read_text())
    who |= {"pid": lives.pid, "start_time": started(lives.pid), "boot_id": BOOT_ID}
    who["has_cgroup"] = False  # this one stands beside any
    identity.write_text(json.dumps(who))
    yield content | {"pid": lives.pid}
    lives.kill()
    lives.wait()


async def are_adopted(daemon: Daemon, content: dict[str, Any], bodies: dict[str, Any]) -> None:
    """Both kernels are as they were, and the requests that made them still mean them."""
    await daemon.start(AGENTS + gpus(2))
    same = ("agent_id", "state", "slots", "allocation", "created_at", "exit_code", "ports")
    for name, was in content["kernels"].items():
        now = await daemon.get(f"/v1/kernels/{name}")
        assert {m: now[m] for m in same} == {m: was.get(m, []) for m in same}
        expected = "its device label is missing"  # 0.2.0 wrote none for a process
        assert now["reason"] == "" or now["reason"].startswith(expected)
        again = await daemon.create(kernel_id=name, **bodies[name])
        assert (again.status, again.json) == (200, now)
    assert await daemon.free("cuda.device") == "1"


@ONE_AT_A_TIME
async def test_processes_of_an_older_agentd_are_adopted(
    folder: Path, recorded: dict[str, Any], left_behind: dict[str, Any]
) -> None:
    daemon = Daemon(folder, "process")
    daemon.node = left_behind["node"]
    try:
        await are_adopted(daemon, left_behind, recorded["bodies"])
        assert (await daemon.get("/v1/kernels/lives"))["pid"] == left_behind["pid"]
        assert started(left_behind["pid"])
    finally:
        await daemon.stop()


@ONE_AT_A_TIME
@pytest.mark.docker
async def test_containers_of_an_older_agentd_are_adopted(
    folder: Path, recorded: dict[str, Any], engine: Engine
) -> None:
    content = recorded["docker"]
    ids = {}
    for name, container in content["containers"].items():
        body = recorded["bodies"][name]
        config = {
            "Image": "agentd-test:1",
            "Cmd": body.get("command", ["sleep", "1000"]),
            "Labels": container["labels"],
            "HostConfig": {"NetworkMode": "none"},
        }
        made = engine.call("POST", f"/containers/create?name={container['name']}", config)
        engine.call("POST", f"/containers/{made['Id']}/start")
        ids[name] = made["Id"]
    engine.call("POST", f"/containers/{ids['ended']}/wait")
    daemon = Daemon(folder, "docker", engine)
    daemon.node = content["node"]
    await are_adopted(daemon, content, recorded["bodies"])
    assert {k["kernel_id"]: k["container_id"] for k in await daemon.get("/v1/kernels")} == ids
    await daemon.close()


NEWER = """
import sys
from agentd.core.kernel import record
record.SCHEMA = {schema}
from agentd.cli.agentd.main import agentd
agentd(sys.argv[1:])
"""


@pytest.mark.needs("cgroups")
async def test_going_back_a_version_leaves_newer_kernels_alone(world: World) -> None:
    """A kernel made by an agentd of the next schema, found by the one of today."""
    daemon = world.daemon
    daemon.configure(AGENTS + gpus(3))
    daemon.program = ("-c", NEWER.format(schema=SCHEMA + 1))
    await daemon.start()
    new = await daemon.running(kernel_id="new", slots={"cuda.device": 1})
    ended = await daemon.create(kernel_id="over", command=["true"], slots={"cuda.device": 1})
    assert ended.status == 201
    await daemon.until("over", "terminated")
    lives = world.lives()
    await world.kill()
    daemon.program = ("-m", "agentd")
    await daemon.start()
    kernel = await daemon.get("/v1/kernels/new")
    assert kernel["state"] == "unreadable"
    assert f"schema {SCHEMA + 1} is newer than {SCHEMA}" in kernel["reason"]
    assert kernel["allocation"] == new["allocation"]
    assert world.lives() == lives
    assert await daemon.free("cuda.device") == "2"
    assert (await daemon.get("/v1/kernels/over"))["state"] == "terminated"
    checks = (await daemon.get("/v1/node?check=true"))["checks"]
    assert [check["check"] for check in checks if not check["passed"]] == []
    await world.kill()
    daemon.program = ("-c", NEWER.format(schema=SCHEMA + 1))
    await daemon.start()
    assert await daemon.get("/v1/kernels/new") == new
    await world.check()
