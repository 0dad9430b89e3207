"""The RPC as a caller meets it: problems, authentication, readiness, OpenAPI."""

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentd.http.problem_responses import STATUSES
from support.daemon import AGENTS, BASE, Daemon, gpus
from support.daemon_pool import Serving


@pytest.fixture
async def up(serving_process: Serving) -> Daemon:
    return await serving_process()


@pytest.mark.parametrize(
    ("method", "path", "data", "status", "code", "detail"),
    [
        ("GET", "/v1/nope", None, 404, "NotFound", "/v1/nope"),
        ("PUT", "/v1/node", None, 405, "MethodNotAllowed", "PUT /v1/node"),
        ("GET", "/v1/agents/x", None, 404, "UnknownAgent", "this node has: agent-1, agent-2"),
        ("GET", "/v1/agents/x/kernels", None, 404, "UnknownAgent", "unknown agent x"),
        ("POST", "/v1/agents/x/kernels", b"{}", 404, "UnknownAgent", "unknown agent x"),
        ("GET", "/v1/kernels/x", None, 404, "UnknownKernel", "unknown kernel x"),
        ("GET", "/v1/kernels/x/logs", None, 404, "UnknownKernel", "unknown kernel x"),
        ("POST", "/v1/kernels/x/stop", None, 404, "UnknownKernel", "unknown kernel x"),
        ("POST", "/v1/kernels/x/signal", b'{"signal": "INT"}', 404, "UnknownKernel", "kernel x"),
        ("DELETE", "/v1/kernels/x", None, 404, "UnknownKernel", "unknown kernel x"),
        ("POST", "/v1/devices/cuda/x/drain", None, 404, "UnknownDevice", "has: cuda0, cuda1"),
        ("DELETE", "/v1/devices/tpu/x", None, 404, "UnknownDevice", "(this node has: none)"),
        ("GET", "/v1/kernels?x=1", None, 422, "InvalidRequest", "unknown query parameter x"),
        ("DELETE", "/v1/kernels/x?timeout=-1", None, 422, "InvalidRequest", "timeout"),
        ("DELETE", "/v1/kernels/x?timeout=nan", None, 422, "InvalidRequest", "timeout"),
        ("GET", "/v1/kernels/x/logs?tail=-1", None, 422, "InvalidRequest", "tail"),
        ("GET", "/v1/kernels/x/logs?follow=maybe", None, 422, "InvalidRequest", "follow"),
        ("POST", "/v1/kernels/x/stop", b'{"timeout": "soon"}', 422, "InvalidRequest", "timeout"),
        ("POST", "/v1/kernels/x/signal", None, 422, "InvalidRequest", "signal"),
        ("POST", "/v1/kernels/x/signal", b'{"signal": "STOP"}', 422, "InvalidRequest", "signal"),
        ("POST", "/v1/kernels/x/signal", b'{"signal": "SIGINT"}', 422, "InvalidRequest", "signal"),
        ("POST", "/v1/kernels/x/signal", b'{"signal": 2}', 422, "InvalidRequest", "signal"),
    ],
)
async def test_every_refusal_is_a_problem(up, method, path, data, status, code, detail) -> None:
    answer = await up.call(method, path, data=data)
    assert (answer.status, answer.json["code"]) == (status, code), answer.content
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert detail in answer.json["detail"]
    assert set(answer.json) >= {"type", "title", "status", "detail", "code"}
    if code == "InvalidRequest":
        assert all(set(item) == {"where", "why"} for item in answer.json["errors"])


@pytest.mark.parametrize(
    ("body", "code", "where"),
    [
        (b"{", "InvalidRequest", ""),
        (b"[]", "InvalidRequest", ""),
        (b"\xff", "InvalidRequest", ""),
        (b'{"comand": ["true"]}', "InvalidRequest", "comand"),
        (b'{"command": "true"}', "InvalidRequest", "command"),
        (b'{"command": [1]}', "InvalidRequest", "command.0"),
        (b'{"command": [""]}', "InvalidRequest", "command"),
        (b'{"command": []}', "InvalidRequest", "command"),
        (b'{"command": ["a\\u0000b"]}', "InvalidRequest", "command.0"),
        (b'{"command": ["true"], "kernel_id": "../x"}', "InvalidRequest", "kernel_id"),
        (b'{"command": ["true"], "env": {"A=B": "x"}}', "InvalidRequest", "env.A=B"),
        (b'{"command": ["true"], "env": {"AGENTD_X": "x"}}', "InvalidRequest", "env.AGENTD_X"),
        (b'{"command": ["true"], "user": "daemon"}', "InvalidRequest", "user"),
        (b'{"command": ["a"], "ports": [{"container": 0}]}', "InvalidRequest", "ports.0.container"),
        (
            b'{"command": ["true"], "mounts": [{"source": "/", "target": "/x"}]}',
            "InvalidRequest",
            "mounts",
        ),
        (b'{"command": ["true"], "slots": {"cpu": NaN}}', "InvalidSlotAmount", "slots.cpu"),
        (b'{"command": ["true"], "slots": {"cpu": 1e0}}', "InvalidSlotAmount", "slots.cpu"),
        (b'{"command": ["true"], "slots": {"cpu": 1e999}}', "InvalidSlotAmount", "slots.cpu"),
        (b'{"command": ["true"], "slots": {"cpu": true}}', "InvalidSlotAmount", "slots.cpu"),
        (b'{"command": ["true"], "slots": {"mem": "1x"}}', "InvalidSlotAmount", "slots.mem"),
        (b'{"command": ["true"], "slots": {"cpu": 99999999999999999999}}', "InvalidSlotAmount",
         "slots.cpu"),
    ],
)  # fmt: skip
async def test_a_bad_body_is_named_member_by_member(up: Daemon, body, code, where) -> None:
    answer = await up.call("POST", "/v1/agents/agent-1/kernels", data=body)
    assert (answer.status, answer.json["code"]) == (422, code), answer.content
    assert where in [item["where"] for item in answer.json["errors"]]
    assert await up.get("/v1/kernels") == []


async def test_body_with_a_wrong_encoding_is_refused(up: Daemon) -> None:
    headers = {"Content-Encoding": "gzip"}
    answer = await up.call("POST", "/v1/agents/agent-1/kernels", None, headers, b"no gzip")
    assert (answer.status, answer.json["code"]) == (422, "InvalidRequest")


async def test_amounts_are_read_as_they_were_written(up: Daemon) -> None:
    body = b'{"command": ["sleep", "9"], "slots": {"cpu": 1.0, "mem": 1048576.0}}'
    answer = await up.call("POST", "/v1/agents/agent-1/kernels", data=body)
    assert answer.status == 201
    assert answer.json["slots"] == {"cpu": "1", "mem": "1048576"}


async def test_the_node_its_slots_and_its_agents_are_shown(up: Daemon) -> None:
    node = await up.get("/v1/node")
    assert node["id"] == up.node
    assert node["runtime"] == {"name": "process", "state": "available", "reason": ""}
    assert node["plugins"][0] == {
        "name": "cuda", "plugin": "sim", "state": "ready", "reason": "", "slots": ["cuda.device"]
    }  # fmt: skip
    slots = {slot["name"]: slot for slot in await up.get("/v1/slot-types")}
    assert set(slots) == {"cpu", "mem", "cuda.device"}
    assert (slots["mem"]["kind"], slots["cuda.device"]["quantum"]) == ("bytes", "1")
    agent = await up.get("/v1/agents/agent-2")
    assert agent["devices"]["cuda"] == ["cuda0", "cuda1"]
    assert agent["slots"]["cuda.device"] == {"capacity": "2", "allocated": "0", "free": "2"}
    assert agent["scaling_factors"] == {"cpu": "1", "mem": "1", "cuda.device": "1"}
    assert [a["agent_id"] for a in await up.get("/v1/agents")] == ["agent-1", "agent-2"]


def test_every_error_code_has_a_status() -> None:
    from agentd import errors

    codes = {
        value.code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.AgentdError)
    }
    of_clients = {"Unreachable", "OutputDropped"}
    assert codes - {"ConfigRefused", "DaemonFailed", "StartRefused"} - of_clients <= set(STATUSES)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def over_tcp(url: str, token: str | None = None, **options: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers, **options) as r,
    ):
        return r.status, json.loads(await r.read())


async def test_tcp_needs_the_token_and_probes_do_not(plain: Daemon) -> None:
    port = free_port()
    (plain.folder / "token").write_text("s3cret\n")
    (plain.folder / "token").chmod(0o600)
    listen = f'listen = "127.0.0.1:{port}"\ntoken-file = "{plain.folder}/token"\n[host]\n'
    plain.configure(base=BASE.replace("[host]\n", listen))
    await plain.start()
    url = f"http://127.0.0.1:{port}"
    assert (await over_tcp(f"{url}/v1/node", "s3cret"))[0] == 200
    for token in (None, "wrong", "s3cre"):
        status, problem = await over_tcp(f"{url}/v1/node", token)
        assert (status, problem["code"]) == (401, "Unauthorized")
    for probe in ("/livez", "/readyz"):
        assert (await over_tcp(url + probe))[0] == 200
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET /v1/node HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert raw.recv(64).startswith(b"HTTP/1.1 401")


async def test_the_socket_is_for_its_group_alone(up: Daemon) -> None:
    assert (up.folder / "agentd.sock").stat().st_mode & 0o777 == 0o660


async def refused_start(daemon: Daemon) -> tuple[int, str]:
    process = daemon.spawn()
    code = await asyncio.to_thread(process.wait, 30)
    return code, daemon.log


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("/state", "/other"), "another agentd serves node id"),
        (('id = "', 'id = "other-'), "is in use by another agentd"),
    ],
)
async def test_a_second_daemon_refuses(up: Daemon, change, line) -> None:
    kernel = await up.running()
    text = up.config_file.read_text().replace(*change)
    up.config_file.write_text(text.replace("agentd.sock", "second.sock"))
    code, log = await refused_start(up)
    assert code == 1
    assert line in log.splitlines()[-1]
    assert await up.get("/v1/kernels") == [kernel]


async def test_a_socket_in_use_is_refused_and_a_stale_one_replaced(plain: Daemon) -> None:
    path = plain.folder / "agentd.sock"
    plain.configure()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        code, log = await refused_start(plain)
        assert code == 1
        assert "is in use by another process" in log
    assert path.exists()
    await plain.start()


async def test_stopping_says_so_drains_and_leaves_kernels_running(plain: Daemon) -> None:
    await plain.start()
    kernel = await plain.running()
    assert await plain.stop(signal.SIGTERM) == 0
    said = ""
    while (
        "STOPPING=1" not in said
    ):  # after how it did until then; BlockingIOError if it never comes
        said = plain.notes.recv(4096).decode()
    assert Path(f"/proc/{kernel['pid']}").exists()
    assert not (plain.folder / "agentd.sock").exists()


async def test_free_memory_of_divided_memory_is_that_of_all_agents(
    serving_process: Serving,
) -> None:
    plain = await serving_process('[resource]\nallocation-mode = "auto-split"\n' + AGENTS + gpus())
    before = await plain.device("root")
    assert before["free"] == before["capacity"]
    await plain.running("agent-1", slots={"mem": "1g"})
    after = await plain.device("root")
    assert int(after["free"]) == int(before["capacity"]) - 2**30
