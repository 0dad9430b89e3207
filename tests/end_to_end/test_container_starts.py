"""The start of containers: groups, init, entrypoint and default limits."""

from typing import Any

import pytest

from agentd.client import AsyncClient
from end_to_end.containers import inspected, printed
from support.daemon import AGENTS
from support.daemon_pool import Serving
from support.engine import Engine

pytestmark = pytest.mark.docker
GROUPS = 'allowed-groups = ["daemon", 2000, 44]\n'
ZOMBIES = "(sleep 0.2 &); (sleep 1; grep -h ^State: /proc/[0-9]*/status) & exec sleep 2"
"""An orphan that ends, and process 1, which waits for nobody."""


async def test_groups_of_a_request_are_those_of_the_host(serving_docker: Serving) -> None:
    """The image's group database is empty, and would resolve no name."""
    dockered = await serving_docker(GROUPS + AGENTS)
    groups = ["daemon", 2000, "44"]
    who: dict[str, Any] = {"user": "1000:1000", "groups": groups}
    assert await printed(dockered, "id -G", **who) == "1000 1 44 2000\n"
    await dockered.running(kernel_id="k1", **who)
    async with (
        AsyncClient(dockered.folder / "agentd.sock") as client,
        client.exec("k1", ["id", "-G"]) as running,
    ):
        assert [chunk async for _, chunk in running] == [b"1000 1 44 2000\n"]
    refused = await dockered.create(groups=["root", 2000, 45])
    assert (refused.status, refused.json["code"]) == (422, "InvalidRequest")
    assert refused.json["errors"] == [
        {
            "where": "groups.0",
            "why": "group 'root' is not allowed; allowed-groups: daemon, 2000, 44",
        },
        {"where": "groups.2", "why": "group 45 is not allowed; allowed-groups: daemon, 2000, 44"},
    ]


async def test_init_reaps_and_forwards_signals(serving_docker: Serving, engine: Engine) -> None:
    dockered = await serving_docker()
    assert "Z (zombie)" in await printed(dockered, ZOMBIES)
    assert "Z (zombie)" not in await printed(dockered, ZOMBIES, init=True)
    kernel = await dockered.running(kernel_id="k1", command=["sleep", "1000"], init=True)
    assert inspected(engine, kernel)["HostConfig"]["Init"] is True
    assert (await dockered.call("POST", "/v1/kernels/k1/stop", {"timeout": 60})).status == 200
    assert (await dockered.get("/v1/kernels/k1"))["exit_code"] == 143
    missing = await dockered.create(kernel_id="k2", command=["no-such-program"], init=True)
    assert missing.status == 201
    assert (await dockered.until("k2", "terminated"))["exit_code"] == 127


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"command": ["a"]}, "entry a"),
        ({}, "entry usual"),
        ({"entrypoint": [], "command": ["echo", "a"]}, "a"),
        ({"entrypoint": ["echo", "own"]}, "own"),
        ({"entrypoint": ["echo", "own"], "command": ["a"]}, "own a"),
        ({"entrypoint": None, "command": ["a"]}, "entry a"),
    ],
)
async def test_entrypoint_replaces_that_of_the_image(
    serving_docker: Serving, engine: Engine, members: dict, words: str
) -> None:
    changes = '&changes=ENTRYPOINT%20["echo","entry"]&changes=CMD%20["usual"]'
    engine.import_image("entry:1", changes)
    dockered = await serving_docker()
    answer = await dockered.create(
        **{"kernel_id": "k1", "command": [], "image": "entry:1"} | members
    )
    assert answer.status == 201, answer.content
    await dockered.until("k1", "terminated")
    assert (await dockered.call("GET", "/v1/kernels/k1/logs")).content.decode() == f"{words}\n"


async def test_entrypoint_that_cannot_run_is_named(serving_docker: Serving) -> None:
    dockered = await serving_docker()
    missing = await dockered.create(entrypoint=["/no/such"], command=["sleep"])
    assert (missing.status, missing.json["code"]) == (422, "CommandNotFound")
    assert "'/no/such'" in missing.json["detail"]
    empty = await dockered.create(entrypoint=[], command=[])
    assert empty.json["errors"] == [
        {"where": "command", "why": "is empty; without an entrypoint it is required"}
    ]


async def test_default_limits_hold_in_a_container_and_its_execs(
    serving_docker: Serving, engine: Engine
) -> None:
    limits = "default-ulimits = { nofile = { soft = 300, hard = 400 }, core = 0 }\n"
    dockered = await serving_docker(limits + AGENTS)
    script = "ulimit -n; ulimit -Hn; ulimit -c"
    assert (await printed(dockered, script)).split() == ["300", "400", "0"]
    own = {"nofile": {"soft": 350, "hard": 500}}
    assert (await printed(dockered, script, ulimits=own)).split() == ["350", "500", "0"]


async def test_default_limit_that_the_engine_cannot_set_is_named(serving_docker: Serving) -> None:
    dockered = await serving_docker(f"default-ulimits = {{ nofile = {2**40} }}\n" + AGENTS)
    answer = await dockered.create()
    assert (answer.status, answer.json["code"]) == (502, "RuntimeFailure")
    assert "cannot set a default ulimit" in answer.json["detail"]
    own = {"nofile": {"soft": 300, "hard": 400}}
    assert await printed(dockered, "ulimit -n", ulimits=own) == "300\n"
