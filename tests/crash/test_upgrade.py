"""Records of older agentds are adopted; those of newer ones are left alone.

`tests/recorded` holds the files of each version for a running and an ended kernel. The tests put
real processes and containers under those records, as that version left them.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentd.core.kernel.record import SCHEMA
from support.checked_node import CheckedNode, start_time
from support.daemon import AGENTS, Daemon, gpus
from support.engine import Engine

ONE_AT_A_TIME = pytest.mark.xdist_group("recorded")
"""The node ids are those that were recorded."""
RECORDED = Path(__file__).parents[1] / "recorded"
OLDEST = json.loads((RECORDED / "0.2.0.json").read_text())
"""A kernel that runs, and one that has ended."""
NODE = json.loads((RECORDED / "427f930.json").read_text())
"""A drain, a replaced device, dealings, claims of each kind of holder, and a ready engine."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


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
    folder: Path, processes: dict[str, int]
) -> None:
    content = OLDEST["process"]
    restore(folder, content, processes)
    daemon = Daemon(folder, "process")
    daemon.node = content["node"]
    try:
        await are_adopted(daemon, content, OLDEST["bodies"])
        assert (await daemon.get("/v1/kernels/lives"))["pid"] == processes["lives"]
        assert start_time(processes["lives"])
    finally:
        await daemon.stop()


@ONE_AT_A_TIME
@pytest.mark.docker
async def test_containers_of_an_older_agentd_are_adopted(folder: Path, engine: Engine) -> None:
    content = OLDEST["docker"]
    ids = create_containers(engine, content["containers"], OLDEST["bodies"])
    daemon = Daemon(folder, "docker", engine)
    daemon.node = content["node"]
    await are_adopted(daemon, content, OLDEST["bodies"])
    assert {k["kernel_id"]: k["container_id"] for k in await daemon.get("/v1/kernels")} == ids
    await daemon.close()


def create_containers(
    engine: Engine, containers: dict[str, Any], bodies: dict[str, Any]
) -> dict[str, str]:
    """Create the recorded containers, and return their ids by kernel."""
    ids = {}
    for name, container in containers.items():
        config = {
            "Image": "agentd-test:1",
            "Cmd": bodies[name].get("command", ["sleep", "1000"]),
            "Labels": container["labels"],
            "HostConfig": {"NetworkMode": "none"},
        }
        created = engine.call("POST", f"/containers/create?name={container['name']}", config)
        engine.call("POST", f"/containers/{created['Id']}/start")
        ids[name] = created["Id"]
    engine.call("POST", f"/containers/{ids['ended']}/wait")
    return ids


def restore(folder: Path, content: dict[str, Any], pids: dict[str, int]) -> None:
    """Write a recorded state folder as one of this boot, with these processes in its files."""
    for name, text in content["files"].items():
        path = folder / "state" / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(re.sub(r'"boot_id": ?"[^"]*"', f'"boot_id":"{BOOT_ID}"', text))
        if name == "engines.json":
            path.write_text(json.dumps({"ready": {"slurm": BOOT_ID}, "schema": 1}))
        elif (pid := pids.get(path.parent.name)) and path.name == "identity.json":
            who = {"pid": pid, "start_time": start_time(pid), "boot_id": BOOT_ID}
            put(path, json.loads(text) | who | {"has_cgroup": False})
        elif path.parent.name == "claims" and (pid := pids.get(path.stem)):
            claim = json.loads(path.read_text())
            claim["holder"] |= {"pid": pid, "start_time": start_time(pid)}
            put(path, claim)
    (folder / "state").chmod(0o711)


def put(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


@pytest.fixture
def processes() -> Iterator[dict[str, int]]:
    """A process for each kernel that runs, and for the claim of a process."""
    names = ("lives", "from-claim", "c-pid")
    children = {name: subprocess.Popen(["sleep", "1000"], start_new_session=True) for name in names}
    yield {name: child.pid for name, child in children.items()}
    for child in children.values():
        child.kill()
        child.wait()


async def is_as_recorded(daemon: Daemon, content: dict[str, Any]) -> None:
    """Kernels, claims, devices, agents and engines are as they were."""
    await daemon.start(NODE["config"].replace('links = [["cuda0", "cuda1"]]\n', ""))
    kernels = {kernel["kernel_id"]: kernel for kernel in await daemon.get("/v1/kernels")}
    of_a_kernel = ("agent_id", "state", "slots", "allocation", "created_at", "exit_code", "labels")
    for was in content["kernels"]:
        now = kernels[was["kernel_id"]]
        assert {name: now[name] for name in of_a_kernel} == {
            name: was[name] for name in of_a_kernel
        }
    claims = {claim["claim_id"]: claim for claim in await daemon.get("/v1/claims")}
    assert claims.keys() == {"c-name", "c-pid", "c-ttl", "c-used"}  # the cgroup has ended
    for was in content["claims"]:
        if (now := claims.get(was["claim_id"])) is not None:
            assert now | {"holder": 0, "expires_at": 0} == was | {"holder": 0, "expires_at": 0}
    states = {d["id"]: d["state"] for d in content["devices"]}
    assert {d["id"]: d["state"] for d in await daemon.get("/v1/devices")} == states
    for device in content["devices"]:
        holders = [holder for holder in device["holders"] if holder.get("claim_id") != "c-cgroup"]
        assert sorted((await daemon.device(device["id"]))["holders"], key=str) == sorted(
            holders, key=str
        )
    owned = {agent["agent_id"]: agent["devices"] for agent in content["agents"]}
    assert {a["agent_id"]: a["devices"] for a in await daemon.get("/v1/agents")} == owned
    assert await daemon.get("/v1/engines") == content["engines"]


@ONE_AT_A_TIME
async def test_node_of_an_older_agentd_is_as_it_was(
    folder: Path, processes: dict[str, int]
) -> None:
    restore(folder, NODE["process"], processes)
    daemon = Daemon(folder, "process")
    daemon.node = NODE["process"]["node"]
    try:
        await is_as_recorded(daemon, NODE["process"])
    finally:
        await daemon.stop()


@ONE_AT_A_TIME
@pytest.mark.docker
async def test_node_of_an_older_agentd_keeps_its_containers(
    folder: Path, processes: dict[str, int], engine: Engine
) -> None:
    content = NODE["docker"]
    restore(folder, content, processes)
    labels = json.dumps(content["containers"])
    old_boot_id = json.loads(content["files"]["claims/c-ttl.json"])["boot_id"]
    create_containers(engine, json.loads(labels.replace(old_boot_id, BOOT_ID)), NODE["bodies"])
    daemon = Daemon(folder, "docker", engine)
    daemon.node = content["node"]
    await is_as_recorded(daemon, content)
    await daemon.close()


NEWER = """
import sys
from agentd.core.kernel import record
record.SCHEMA = {schema}
from agentd.cli.agentd.main import agentd
agentd(sys.argv[1:])
"""


@pytest.mark.needs("cgroups")
async def test_going_back_a_version_leaves_newer_kernels_alone(node: CheckedNode) -> None:
    """A kernel made by an agentd of the next schema, found by the one of today."""
    daemon = node.daemon
    daemon.configure(AGENTS + gpus(3))
    daemon.program = ("-c", NEWER.format(schema=SCHEMA + 1))
    await daemon.start()
    new = await daemon.running(kernel_id="new", slots={"cuda.device": 1})
    ended = await daemon.create(kernel_id="over", command=["true"], slots={"cuda.device": 1})
    assert ended.status == 201
    await daemon.until("over", "terminated")
    lives = node.live_commands()
    await node.kill()
    daemon.program = ("-m", "agentd")
    await daemon.start()
    kernel = await daemon.get("/v1/kernels/new")
    assert kernel["state"] == "unreadable"
    assert f"schema {SCHEMA + 1} is newer than {SCHEMA}" in kernel["reason"]
    assert kernel["allocation"] == new["allocation"]
    assert node.live_commands() == lives
    assert await daemon.free("cuda.device") == "2"
    assert (await daemon.get("/v1/kernels/over"))["state"] == "terminated"
    assert await daemon.failed_checks() == []
    await node.kill()
    daemon.program = ("-c", NEWER.format(schema=SCHEMA + 1))
    await daemon.start()
    assert await daemon.get("/v1/kernels/new") == new
    await node.check()
