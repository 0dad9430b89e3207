"""A caller's mistake is refused as one, and no answer shows the engine's storage."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import AGENTS, BASE, Daemon
from support.engine import Engine

IMAGES = {
    "user:1": "USER%20nosuch",
    "group:1": "USER%200:nosuch",
    "uid:1": "USER%20-1",
    "folder:1": "WORKDIR%20/bin/busybox/x",
}
LONG = "/" + "x" * 5000
NAME = "/" + "x" * 300
IN_CONTAINERS: list[tuple[dict[str, Any], str]] = [
    ({"user": "-1"}, "user"),
    ({"user": "0:-1"}, "user"),
    ({"user": "0:nosuch"}, "user"),
    ({"user": "99999999999"}, "user"),
    ({"user": "nosuch"}, "user"),
    ({"image": "user:1"}, "image"),
    ({"image": "group:1"}, "image"),
    ({"image": "uid:1"}, "image"),
    ({"image": "folder:1"}, "image"),
    ({"ulimits": {"nofile": 2**40}}, "ulimits.nofile"),
    ({"ulimits": {"nofile": -1}}, "ulimits.nofile"),
    ({"ulimits": {"nofile": 0}}, "ulimits.nofile"),
    ({"ulimits": {"nproc": 2**62}}, "ulimits.nproc"),
    ({"ulimits": {"data": 1}}, "ulimits.data"),
    ({"ulimits": {"rtprio": 99}}, "ulimits.rtprio"),
    ({"ulimits": {"files": 1}}, "ulimits"),
    ({"ulimits": {"nofile": {"soft": 2, "hard": 1}}}, "ulimits"),
    ({"network": "bridge"}, "network"),
    ({"network": "host"}, "network"),
    ({"network": "container:other"}, "network"),
    ({"shm_size": 0}, "shm_size"),
    ({"shm_size": "much"}, "shm_size"),
    ({"pids_limit": 0}, "pids_limit"),
    ({"mounts": [{"source": "/etc", "target": "/x"}]}, "mounts.0.source"),
    ({"env": {"NVIDIA_VISIBLE_DEVICES": "all"}}, "env.NVIDIA_VISIBLE_DEVICES"),
    ({"env": {"AMD_VISIBLE_DEVICES": "0"}}, "env.AMD_VISIBLE_DEVICES"),
    ({"labels": {"io.agentd.node": "other"}}, "labels.io.agentd.node"),
    ({"tmpfs": [{"target": "/a"}, {"target": "/a"}]}, "mounts"),
    *(
        ({"mounts": [{"source": "{data}", "target": target}]}, "mounts.0.target")
        for target in (
            "/dev", "/dev/null", LONG, NAME, "/" + "x/" * 2500, "/bin/busybox", "/bin/busybox/x",
            "/etc/hosts",
        )
    ),
    ({"mounts": [{"source": "{data}/file", "target": "/bin"}]}, "mounts.0.target"),
    ({"mounts": [{"source": "{data}/file", "target": "/dev/null"}]}, "mounts.0.target"),
    ({"mounts": [{"source": "{data}/unreadable", "target": "/x"}]}, "mounts.0.source"),
    ({"mounts": [{"source": "{data}/chain0", "target": "/x"}]}, "mounts.0.source"),
    *(
        ({"tmpfs": [{"target": target}]}, "tmpfs.0.target")
        for target in (
            "/dev/null", LONG, "/bin/busybox", "/bin/busybox/x", "/proc/sys", "/../etc",
        )
    ),
    *(
        ({"working_dir": folder}, "working_dir")
        for folder in (
            "/bin/busybox", "/bin/busybox/x", LONG, NAME, "/proc/self/nosuch", "/dev/null",
            "/sys/x",
        )
    ),
]  # fmt: skip
NO_COMMANDS = [[word] for word in ("x" * 4000, NAME, "/bin/busybox/x", "/etc", "nosuch")]


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.docker) for n in ("engine", "engine26")])
async def containers(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Daemon]:
    """A node on which one folder can be mounted, and an engine with images that cannot run."""
    engine: Engine = request.getfixturevalue(request.param)
    for image, change in IMAGES.items():
        engine.import_image(image, f"&changes={change}")
    data = folder / "data"
    data.mkdir()
    (data / "file").touch()
    (data / "unreadable").symlink_to("/proc/2/exe")
    for number in range(1200):
        (data / f"chain{number}").symlink_to(f"chain{number + 1}")
    daemon = Daemon(folder, "docker", engine)
    allowed = f'stop-timeout = 1\nallowed-mounts = ["{data}"]'
    daemon.configure(AGENTS, BASE.replace("stop-timeout = 1", allowed))
    await daemon.start()
    yield daemon
    await daemon.close()


def filled(body: dict[str, Any], data: Path) -> dict[str, Any]:
    """Name the folder that can be mounted in a request."""
    mounts = [{**m, "source": m["source"].replace("{data}", str(data))} for m in body["mounts"]]
    return {**body, "mounts": mounts}


async def test_a_mistake_in_a_container_is_named_and_leaves_nothing(containers: Daemon) -> None:
    for body, where in IN_CONTAINERS:
        asked = filled(body, containers.folder / "data") if "mounts" in body else body
        answer = await containers.create(**asked)
        assert (answer.status, answer.json.get("code")) == (422, "InvalidRequest"), asked
        assert [problem["where"] for problem in answer.json["errors"]] == [where], answer.json
        assert "overlay2" not in answer.content.decode()
        assert len(answer.json["detail"]) < 300 + len(str(asked)), answer.json
    assert containers.test_engine is not None
    assert containers.test_engine.containers() == await containers.get("/v1/kernels") == []


async def test_a_command_that_no_path_leads_to_is_not_found(containers: Daemon) -> None:
    for command in NO_COMMANDS:
        answer = await containers.create(command=command)
        assert (answer.status, answer.json["code"]) == (422, "CommandNotFound"), answer.json
        assert len(answer.json["detail"]) < 1200


IN_PROCESSES: list[tuple[dict[str, Any], str]] = [
    ({"user": "-1"}, "user"),
    ({"ulimits": {"nofile": 2**40}}, "ulimits.nofile"),
    ({"ulimits": {"nofile": 0}}, "ulimits.nofile"),
    ({"working_dir": "/etc/passwd"}, "working_dir"),
    ({"working_dir": "/etc/passwd/x"}, "working_dir"),
    ({"working_dir": LONG}, "working_dir"),
    ({"working_dir": NAME}, "working_dir"),
]


@pytest.mark.needs("root")
async def test_a_mistake_in_a_process_is_named_too(plain: Daemon) -> None:
    await plain.start(AGENTS)
    for body, where in IN_PROCESSES:
        answer = await plain.create(**body)
        assert (answer.status, answer.json.get("code")) == (422, "InvalidRequest"), answer.json
        assert [problem["where"] for problem in answer.json["errors"]] == [where], answer.json
    for command in NO_COMMANDS:
        answer = await plain.create(command=command)
        assert (answer.status, answer.json["code"]) == (422, "CommandNotFound"), answer.json
    assert await plain.get("/v1/kernels") == []
