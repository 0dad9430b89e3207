"""Containers made by hand: what their labels may claim, and what comes of it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import AGENTS, Daemon, gpus
from support.engine import IMAGE, Engine
from support.waiting import until

pytestmark = pytest.mark.docker
NODE = AGENTS + gpus(2)
PATHS = ["../../PWNED", "..", "a/b", "/etc/x", "k\n", "-x", "x" * 64, ""]


@pytest.fixture
async def node(engine: Engine, folder: Path) -> AsyncIterator[Daemon]:
    engine.clean()
    daemon = Daemon(folder, "docker", engine)
    await daemon.start(NODE)
    yield daemon
    await daemon.close()
    engine.clean()


def made(
    engine: Engine, daemon: Daemon, kernel_id: str, agent: str = "agent-1", **config: Any
) -> str:
    """Make a container that says it is a kernel of the node; its record is a lie, too."""
    labels = {
        "io.agentd.node": daemon.node,
        "io.agentd.agent": agent,
        "io.agentd.kernel": kernel_id,
        "io.agentd.schema": "1",
        "io.agentd.record": json.dumps({"schema": 1, "kernel_id": kernel_id}),
    }
    body = {
        "Image": IMAGE,
        "Cmd": ["sleep", "1000"],
        "Labels": labels,
        "HostConfig": {"NetworkMode": "none", **config},
    }
    return str(engine.call("POST", "/containers/create", body)["Id"])


def files(folder: Path) -> set[str]:
    """Return the files around the state folder, but for what the tests themselves keep."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


async def warnings(daemon: Daemon) -> list[str]:
    return [w for w in await daemon.warnings() if "is ignored" in w]


async def test_a_label_that_is_a_path_is_a_warning_and_holds_nothing(node, engine, folder) -> None:
    before, free = files(folder), await node.free("cuda.device")
    for kernel_id in PATHS:
        engine.call("POST", f"/containers/{made(engine, node, kernel_id)}/start")
    await until(lambda: warnings(node), lambda found: len(found) == len(PATHS))  # by events alone
    for _ in range(2):
        assert await node.get("/v1/kernels") == []
        assert await node.free("cuda.device") == free
        assert len(told := await warnings(node)) == len(PATHS)
        assert any("'../../PWNED'" in warning for warning in told)
        assert all(len(warning) < 250 and "\n" not in warning for warning in told)
        assert files(folder) == before
        await node.restart()
    for path in ("..%2F..%2FPWNED", "..%2fPWNED", "a%2Fb", "-x"):
        answer = await node.call("DELETE", f"/v1/kernels/{path}")
        assert (answer.status, answer.json["code"]) == (404, "UnknownKernel")
    assert len(engine.containers()) == len(PATHS)
    engine.clean()
    await until(lambda: warnings(node), [])


async def test_a_file_outside_of_the_state_folder_is_never_removed(node, engine, folder) -> None:
    victim = folder / "PWNED.json"
    victim.write_text("precious")
    container = made(engine, node, "../../PWNED")
    engine.call("POST", f"/containers/{container}/start")
    await node.restart()
    engine.call("POST", f"/containers/{container}/kill")
    engine.call("DELETE", f"/containers/{container}?force=1")
    await node.restart()
    assert victim.read_text() == "precious"


async def test_an_agent_that_is_a_path_is_an_unknown_agent(node, engine) -> None:
    container = made(engine, node, "k1", agent="../../PWNED")
    engine.call("POST", f"/containers/{container}/start")
    await until(node.kernel_ids, {"k1"})
    kernel = await node.until("k1", "unreadable")
    assert kernel["agent_id"] == ""
    assert await node.free("cuda.device") == "0", "nobody can tell what it holds"
