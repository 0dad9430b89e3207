"""Each limit of `docs/reference/limits.md` is reached, and one more is refused.

Most are tried on the part that has the limit, with stand-ins for what else the node has. Those of
bodies, lists and streams as they arrive are tried on a daemon.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

import test_docs
from agentd.client.errors import error_from_response
from agentd.config.loading import load
from agentd.core.claim.claim import ClaimHolder, NameHolder
from agentd.core.slots import read_quantity
from agentd.errors import AgentdError, UnknownKernel
from agentd.host.claim_holders import max_process_holders
from agentd.http.bodies import Body, read_body
from agentd.http.server import FURTHER_FRACTION, TCP_FRACTION
from agentd.http.streaming.websocket import MAX_FRAME
from agentd.plugin_api import ConditionInfo, DeviceInfo, SlotTypeInfo
from agentd.pluginhost.validation import InvalidAnswer, validate_listing
from agentd.rpc.requests import (
    CreateClaimRequest,
    CreateKernelRequest,
    EditsRequest,
    EngineRequest,
    StopRequest,
)
from services.claims.test_claim_service import ADMIN, PROCESS, spec
from services.node import Rig
from support.daemon import Daemon
from support.daemon_pool import Serving

generate = test_docs.generate
ROWS = [row for rows in generate.REFUSING.values() for row in rows]
DESCRIPTORS = 1024
"""Of the test of claims that end with a process."""


class Parts(Body):
    """A body of as many objects as a test likes."""

    parts: list[dict[str, int]]


def body_of(model: type[Body], **members: Any) -> None:
    read_body(model, json.dumps(members))


def names(count: int) -> dict[str, str]:
    return {f"a{number}": "" for number in range(count)}


KERNEL, CLAIM = CreateKernelRequest, CreateClaimRequest
BODIES: Mapping[str, tuple[Callable[[int], None], ...]] = {
    "parts": (lambda n: body_of(Parts, parts=[{}] * (n - 2)),),
    "words": (
        lambda n: body_of(KERNEL, command=["a"] * n),
        lambda n: body_of(KERNEL, entrypoint=["a"] * n),
        lambda n: body_of(KERNEL, devices={"a": ["x"] * n}),
    ),
    "command": (
        lambda n: body_of(KERNEL, command=["a", *["b" * 1000] * 130, "c" * (n - 130_001)]),
        lambda n: body_of(
            KERNEL, entrypoint=["a", *["b" * 1000] * 130], command=["c" * (n - 130_001)]
        ),
    ),
    "variables": (
        lambda n: body_of(KERNEL, env=names(n)),
        lambda n: body_of(KERNEL, labels=names(n)),
    ),
    "items": (
        lambda n: body_of(KERNEL, slots=dict.fromkeys(names(n), 0)),
        lambda n: body_of(KERNEL, devices={key: ["x"] for key in names(n)}),
        lambda n: body_of(KERNEL, mounts=[{"source": "/a", "target": "/b"}] * n),
        lambda n: body_of(KERNEL, ports=[{"container": 1}] * n),
        lambda n: body_of(KERNEL, tmpfs=[{"target": "/a"}] * n),
    ),
    "groups": (lambda n: body_of(KERNEL, groups=[*range(n)]),),
    "group-id": (lambda n: body_of(KERNEL, groups=[n]),),
    "edits": (lambda n: body_of(EditsRequest, claims=["c"] * n),),
    "text": (
        lambda n: body_of(KERNEL, command=["a", "b" * n]),
        lambda n: body_of(KERNEL, env={"a": "b" * n}),
    ),
    "path": (
        lambda n: body_of(KERNEL, working_dir="/" + "a" * (n - 1)),
        lambda n: body_of(KERNEL, image="a" * n),
        lambda n: body_of(KERNEL, command=["a" * n]),
    ),
    "name": (
        lambda n: body_of(KERNEL, env={"a" * n: ""}),
        lambda n: body_of(KERNEL, labels={"a" * n: ""}),
        lambda n: body_of(KERNEL, slots={"a" * n: 0}),
        lambda n: body_of(KERNEL, user="a" * n),
        lambda n: body_of(CLAIM, holder={"name": "a" * n}),
    ),
    "id": (
        lambda n: body_of(KERNEL, kernel_id="a" * n),
        lambda n: body_of(CLAIM, claim_id="a" * n, holder={"ttl": 1}),
    ),
    "ttl": (lambda n: body_of(CLAIM, holder={"ttl": n}),),
    "engine": (lambda n: body_of(EngineRequest, ready=True, conditions=[{"reason": "a"}] * n),),
    "sentence": (
        lambda n: body_of(EngineRequest, ready=True, conditions=[{"reason": "a" * n}]),
        lambda n: body_of(
            EngineRequest, ready=True, conditions=[{"reason": "a", "remedy": "b" * n}]
        ),
    ),
    "timeout": (lambda n: body_of(StopRequest, timeout=n),),
    "labels": (
        lambda n: body_of(KERNEL, labels={"a": "b" * (n - 1)}),
        lambda n: body_of(CLAIM, labels={"a": "b" * (n - 1)}, holder={"ttl": 1}),
    ),
}
"""Reads a body with so many of each, by the name of the limit."""


def list_plugin(types: int = 1, devices: int = 0, secondary: int = 0, conditions: int = 0) -> None:
    further = [SlotTypeInfo(f"x.t{n}", primary="x.s0") for n in range(secondary)]
    slots = [*(SlotTypeInfo(f"x.s{n}") for n in range(types)), *further]
    amounts = {slot.name: "1" for slot in further}
    infos = [DeviceInfo(f"d{n}", f"S{n}", "x.s0", secondary=amounts) for n in range(devices)]
    validate_listing("x", slots, infos, [ConditionInfo(f"c{n}") for n in range(conditions)])


def configure(folder: Path, text: str) -> None:
    file = folder / "agent.toml"
    file.write_text(text)
    load(file, {})


ON_FILES: Mapping[str, Callable[[Path, int], None]] = {
    "devices": lambda _, n: list_plugin(devices=n),
    "slot-types": lambda _, n: list_plugin(types=n),
    "secondary": lambda _, n: list_plugin(devices=1, secondary=n),
    "conditions": lambda _, n: list_plugin(conditions=n),
    "config": lambda folder, n: configure(folder, "[node]".ljust(n, "#")),
    "agent-id": lambda folder, n: configure(folder, f'[[agents]]\nid = "{"a" * n}"'),
    "socket": lambda folder, n: configure(folder, f'[rpc]\nsocket = "/{"a" * (n - 1)}"'),
}
"""Lists a plugin or reads a configuration with so many of each."""


async def fill(rig: Rig, count: int, holder: ClaimHolder, agent: str, *sizes: int) -> None:
    """Give a node claims of an agent, the first of them with labels of these sizes in bytes."""
    made = (await rig.claims.create(spec("first", holder, gpus=0)))[0].claim
    rig.claims.release("first", ADMIN)
    for number in range(count):
        labels = {"a": "b" * (sizes[number] - 1)} if number < len(sizes) else {}
        claim = replace(made, claim_id=f"c{number}", agent_id=agent, labels=labels)
        rig.state._claims[claim.claim_id] = claim


async def try_claims(count: int, holder: ClaimHolder, agent: str = "a") -> None:
    rig = Rig()
    await rig.relist()
    await fill(rig, count - 1, holder, agent)
    await rig.claims.create(spec("last", holder, gpus=0))


async def try_labels(size: int, agent: str, *, as_kernel: bool) -> None:
    rig = Rig()
    await rig.relist()
    await fill(rig, 1, NAME, agent, size - 10)
    labels = {"a": "b" * 9}
    if as_kernel:
        await rig.service.create(replace(rig.spec(), labels=labels))
    else:
        await rig.claims.create(spec("last", NAME, gpus=0, labels=labels))


async def try_amount(digits: int) -> None:
    rig = Rig()
    await rig.relist()
    amount = read_quantity(f"{1:0{digits}}")
    await rig.service.create(replace(rig.spec(), slots={"cuda.device": amount}))


NAME = NameHolder("x")
ON_NODE: Mapping[str, Callable[[int], Awaitable[None]]] = {
    "amount": try_amount,
    "claims": lambda n: try_claims(n, NAME, "an agent of before"),
    "claims-agent": lambda n: try_claims(n, NAME),
    "pids": lambda n: try_claims(n, PROCESS),
    "labels-agent": lambda n: try_labels(n, "a", as_kernel=False),
    "labels-agent-kernel": lambda n: try_labels(n, "a", as_kernel=True),
    "labels-node": lambda n: try_labels(n, "b", as_kernel=False),
    "labels-node-kernel": lambda n: try_labels(n, "b", as_kernel=True),
}
"""Creates one claim or kernel, with which the node has so many."""


async def send(daemon: Daemon, method: str, path: str, data: bytes = b"") -> None:
    answer = await daemon.call(method, path, data=BytesIO(data))
    if answer.status >= 400:
        raise error_from_response(answer.status, answer.content)


async def follow(daemon: Daemon, count: int) -> None:
    """Open streams, a third of them execs."""
    await daemon.call("DELETE", "/v1/kernels/k?timeout=0")
    await daemon.running(kernel_id="k", command=["sh", "-c", "echo one; sleep 1000"])
    async with AsyncExitStack() as stack:
        connector = aiohttp.UnixConnector(str(daemon.folder / "agentd.sock"), limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        for number in range(count):
            path = ("/v1/events", "/v1/kernels/k/logs?follow=1", "/v1/kernels/k/exec")[number % 3]
            if path.endswith("exec"):
                await stack.enter_async_context(session.ws_connect(f"http://agentd{path}"))
                continue
            response = await stack.enter_async_context(session.get(f"http://agentd{path}"))
            if response.status >= 400:
                raise error_from_response(response.status, await response.read())


ON_DAEMON: Mapping[str, Callable[[Daemon, int], Awaitable[None]]] = {
    "body": lambda daemon, n: send(daemon, "POST", "/v1/kernels/none/stop", b"{}" + b" " * (n - 2)),
    "page": lambda daemon, n: send(daemon, "GET", f"/v1/claims?limit={n}"),
    "streams": follow,
}
"""Sends so much to a daemon."""


def rows(of: Mapping[str, object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [r for r in ROWS if r.name in of], ids=lambda r: r.name)


def test_each_limit_of_the_page_is_reached_here() -> None:
    assert sorted([*BODIES, *ON_FILES, *ON_NODE, *ON_DAEMON]) == sorted(row.name for row in ROWS)


@rows(BODIES)
def test_body_takes_its_limit_and_no_more(row: Any) -> None:
    for read in BODIES[row.name]:
        read(row.maximum)
        with pytest.raises(AgentdError) as refused:
            read(row.maximum + 1)
        assert refused.value.code == row.answer


@rows(ON_FILES)
def test_plugin_and_file_take_their_limit_and_no_more(row: Any, tmp_path: Path) -> None:
    ON_FILES[row.name](tmp_path, row.maximum)
    with pytest.raises((AgentdError, InvalidAnswer)) as refused:
        ON_FILES[row.name](tmp_path, row.maximum + 1)
    assert getattr(refused.value, "code", "InvalidAnswer") == row.answer


@rows(ON_NODE)
async def test_node_takes_its_limit_and_no_more(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (DESCRIPTORS, DESCRIPTORS))
    await ON_NODE[row.name](row.maximum)
    with pytest.raises(AgentdError) as refused:
        await ON_NODE[row.name](row.maximum + 1)
    assert refused.value.code == row.answer


@rows(ON_DAEMON)
async def test_daemon_takes_its_limit_and_no_more(row: Any, serving_process: Serving) -> None:
    try:
        await ON_DAEMON[row.name](await serving_process(), row.maximum)
    except UnknownKernel:
        assert row.name == "body"  # it was read
    other = await serving_process()  # the first may not have noticed yet that its streams ended
    with pytest.raises(AgentdError) as refused:
        await ON_DAEMON[row.name](other, row.maximum + 1)
    assert refused.value.code == row.answer


async def test_exec_takes_a_frame_of_its_limit_and_no_more(serving_process: Serving) -> None:
    daemon = await serving_process()
    await daemon.running(kernel_id="k")
    connector = aiohttp.UnixConnector(str(daemon.folder / "agentd.sock"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.ws_connect("http://agentd/v1/kernels/k/exec") as wire,
    ):
        await wire.send_json({"command": ["wc", "-c"]})
        await wire.send_bytes(bytes(MAX_FRAME))
        await wire.send_json({"stdin": "closed"})
        printed = b"".join([f.data[1:] async for f in wire if f.type is aiohttp.WSMsgType.BINARY])
        assert int(printed) == MAX_FRAME
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(connector.path)) as session,
        session.ws_connect("http://agentd/v1/kernels/k/exec") as wire,
    ):
        head = b"\x82\xff" + (MAX_FRAME + 1).to_bytes(8) + bytes(4)  # RFC 6455, section 5.2
        wire._response.connection.transport.write(head)
        await wire.receive()
        assert wire.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


def test_clients_and_claims_together_leave_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (DESCRIPTORS, DESCRIPTORS))
    connections = DESCRIPTORS * (TCP_FRACTION + FURTHER_FRACTION)
    assert connections + max_process_holders() <= DESCRIPTORS * 7 / 8


ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "requests": (
        "http/connections/test_request_turns.py",
        "test_requests_beyond_the_turns_of_a_caller_wait_in_order",
    ),
    "tcp": ("http/test_server.py", "test_clients_beyond_the_limit_take_few_descriptors"),
    "sockets": ("hostile/test_clients.py", "test_busy_socket_does_not_block_other_sockets"),
    "header": (
        "http/connections/test_connection.py",
        "test_only_a_header_that_has_begun_has_a_deadline",
    ),
    "body": ("http/test_queries.py", "test_a_body_that_does_not_come_is_refused"),
    "reading": (
        "http/connections/test_connection.py",
        "test_connection_closes_if_a_response_is_not_read",
    ),
    "frame": ("test_limits.py", "test_exec_takes_a_frame_of_its_limit_and_no_more"),
    "control": ("hostile/test_clients.py", "test_a_flood_of_control_frames_is_cut_off"),
    "resume": ("end_to_end/test_events.py", "test_listener_resumes_or_gets_a_reset"),
    "behind": ("test_events.py", "test_listener_that_lags_behind_is_dropped"),
    "entries": ("end_to_end/test_pages.py", "test_each_client_reads_all_pages"),
    "bytes": ("end_to_end/test_pages.py", "test_page_ends_after_its_bytes"),
    "refusals": ("services/test_refusals.py", "test_a_flood_keeps_the_latest"),
    "ended": (
        "services/kernels/test_retention.py",
        "test_the_oldest_ended_kernels_go_first_and_living_ones_never",
    ),
    "records": (
        "services/kernels/test_retention.py",
        "test_retention_bounds_the_bytes_of_ended_kernels",
    ),
    "command": (
        "services/kernels/test_kernel_service.py",
        "test_long_command_is_kept_by_its_bytes",
    ),
    "problems": ("rpc/test_requests.py", "test_refusal_of_a_hostile_body_is_short"),
    "processes": (
        "hostile/test_kernels.py",
        "test_a_kernel_that_forks_without_end_meets_its_limit",
    ),
    "log": ("hostile/test_kernels.py", "test_endless_log_is_bounded"),
}
"""A test of each limit that refuses nothing."""


def test_each_other_limit_of_the_page_has_its_test() -> None:
    assert [*ELSEWHERE] == [name for name, *_ in generate.OTHER_LIMITS]
    for file, name in ELSEWHERE.values():
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(), name
