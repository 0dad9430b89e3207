"""Of several things that are wrong with a create, the first of the contract's order answers."""

import json
from io import BytesIO
from typing import Any

import pytest

from end_to_end.test_access import call
from support.daemon import Daemon

CONFIG = """
[plugins]
open-timeout = 1.0
[plugins.cuda]
plugin = "sim"
count = 1
fault = "raise"
fault-at = "open"
[plugins.npu]
plugin = "sim"
count = 2
[[agents]]
id = "agent-1"
"""
READER = """
[[rpc.sockets]]
path = "{folder}/reader.sock"
role = "read"
"""
UNKNOWN = {"tpu.chip": "garbage"}
AMOUNTS = {"cpu": "x", "mem": 0}
OTHERS = {"devices": {"npu": ["nosuch"]}, "env": {"AGENTD_X": ""}}
PENDING = {"cuda.device": 1}
TOO_MANY = {"npu.device": 99}
BODIES: list[tuple[str, dict[str, Any], int, str, list[str]]] = [
    ("shape", {"slots": {**UNKNOWN, **AMOUNTS, **PENDING, **TOO_MANY}, **OTHERS, "nosuch": 1},
     422, "InvalidRequest", ["nosuch"]),
    ("unknown slot", {"slots": {**UNKNOWN, **AMOUNTS, **PENDING, **TOO_MANY}, **OTHERS},
     422, "UnsupportedResource", []),
    ("values", {"slots": {**UNKNOWN, **AMOUNTS}, "kernel_id": "../x", "pids_limit": 0,
                "ports": [{"container": 99_999}], "shm_size": "zz", "env": {"A=B": ""}},
     422, "UnsupportedResource", []),
    ("the rest", {"slots": {**AMOUNTS, **PENDING, **TOO_MANY}, **OTHERS},
     422, "InvalidRequest",
     ["slots.cpu", "slots.mem", "devices.npu.0", "env.AGENTD_X"]),
    ("amounts", {"slots": {**AMOUNTS, **PENDING, **TOO_MANY}},
     422, "InvalidSlotAmount", ["slots.cpu", "slots.mem"]),
    ("pending", {"slots": {**PENDING, **TOO_MANY}, "devices": {"cuda": ["cuda0"]}},
     503, "PluginUnavailable", []),
    ("capacity", {"slots": TOO_MANY}, 409, "InsufficientResource", []),
]  # fmt: skip


@pytest.fixture
async def node(plain: Daemon) -> Daemon:
    await plain.start(CONFIG + READER.format(folder=plain.folder))
    return plain


async def test_caller_agent_size_and_json_come_first(node: Daemon) -> None:
    known, unknown = (f"/v1/agents/{agent}/kernels" for agent in ("agent-1", "nobody"))
    junk = b"{" * (2 << 20)
    forbidden = await call(node, "reader", "POST", unknown, {"slots": UNKNOWN})
    assert (forbidden.status, forbidden.json["code"]) == (403, "Forbidden")
    for path, data, status in ((unknown, junk, 404), (known, junk, 413), (known, junk[:9], 422)):
        assert (await node.call("POST", path, data=BytesIO(data))).status == status


@pytest.mark.parametrize("query", ["", "?dry_run=true"])
async def test_slots_then_the_rest_then_pending_plugins_then_capacity(
    node: Daemon, query: str
) -> None:
    for name, body, status, code, where in BODIES:
        answer = await node.create(**json.loads(json.dumps(body)), query=query)
        assert (answer.status, answer.json["code"]) == (status, code), name
        named = [problem["where"] for problem in answer.json.get("errors", [])]
        assert sorted(named) == sorted(where), name
    assert await node.get("/v1/kernels") == []


async def test_an_unknown_slot_comes_before_a_kernel_id_that_is_taken(node: Daemon) -> None:
    body = {"kernel_id": "k1", "command": ["sleep", "1000"], "slots": {"cpu": 0}}
    assert (await node.create(**body)).status == 201
    taken = await node.create(**{**body, "slots": {"cpu": 1}})
    assert (taken.status, taken.json["code"]) == (409, "KernelConflict")
    unknown = await node.create(**{**body, "slots": UNKNOWN})
    assert (unknown.status, unknown.json["code"]) == (422, "UnsupportedResource")
    assert (await node.create(**body)).status == 200
