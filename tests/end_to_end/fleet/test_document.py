"""The gateway's OpenAPI document: no request breaks the gateway, and generated clients work."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from end_to_end.documented import CLAIM, GOOD, TOKEN, Documented, called, fuzzed, generated
from end_to_end.fleet.fleet_world import World

NOT_NOW = {
    "put_engine_at_node",
    "forget_node",
    "forget_slot_type",
    "clear_device_at_node",
    "forget_device_at_node",
    "forget_runtime_at_node",
    "retry_plugin_at_node",
}
"""Refused while the node, its device and its runtime are there, and the plugin is ready."""


@pytest.fixture
async def gateway(world: World) -> Documented:
    """A gateway over TCP with one node: a kernel of the fleet, and one made at the node."""
    (node,) = await world.start_nodes("cuda")
    token = world.folder / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = world.gateway(
        world.followed(),
        gateway=f'listen = "{address}"\n',
        rpc=f'[rpc]\ntoken-file = "{token}"\n',
    )
    await program.until({node: "ready"})
    made = await program.create(kernel_id="alive", **GOOD)
    assert made.status == 201, made.content
    await world.nodes[node].running(kernel_id="direct", **GOOD)
    claimed = await world.nodes[node].call("POST", "/v1/agents/agent-1/claims", CLAIM)
    assert claimed.status in (200, 201), claimed.content
    known = {
        "claim": "alive",
        "engine": "slurm",
        "node": node,
        "slot": "cuda.device",
        "agent": "agent-1",
        "device_name": "cuda",
        "id": "cuda0",
        "plugin": "cuda",
        "runtime": "process",
    }
    return Documented(
        f"http://{address}",
        await program.get("/v1/openapi.json"),
        lambda name: {**known, "kernel": "direct" if name.endswith("_at_node") else "alive"},
    )


@pytest.mark.long
async def test_no_documented_request_breaks_the_gateway(gateway: Documented) -> None:
    reached = await asyncio.to_thread(fuzzed, gateway)
    never = gateway.operations.keys() - reached.keys() - gateway.streams
    deletes = {"delete_kernel", "delete_kernel_at_node", "delete_claim_at_node"}
    assert never <= {*NOT_NOW, *deletes}, never
    assert reached["create_kernel"] >= 3


@pytest.mark.long
async def test_a_generated_client_works_for_every_route(
    gateway: Documented, tmp_path: Path
) -> None:
    with generated(gateway.document, tmp_path, "generated_agentd_fleet") as package:
        answers = await asyncio.to_thread(called, gateway, package)
    assert answers.keys() == gateway.operations.keys()
    assert {name: status for name, status in answers.items() if status >= 500} == {}
    good = {name for name, status in answers.items() if status < 300}
    expected = {*NOT_NOW, "exec_kernel", "exec_kernel_at_node"}
    assert gateway.operations.keys() - good <= expected, json.dumps(answers)
