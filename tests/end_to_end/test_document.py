"""The node's OpenAPI document: no request breaks the daemon, and generated clients work."""

import asyncio
import socket
from pathlib import Path

import pytest

from end_to_end.documented import CLAIM, TOKEN, Documented, called, fuzzed, generated
from support.daemon import AGENTS, BASE, Daemon, gpus

KNOWN = {
    "agent": "agent-1",
    "kernel": "alive",
    "claim": "alive",
    "engine": "slurm",
    "device_name": "cuda",
    "id": "cuda0",
    "plugin": "cuda",
    "runtime": "process",
}
NOT_NOW = {"clear_device", "forget_device", "forget_runtime", "retry_plugin"}
"""Refused while the device is listed and healthy, the runtime answers and the plugin is ready."""


@pytest.fixture
async def node(plain: Daemon) -> Documented:
    """A daemon over TCP, with a kernel that lives and a device that can be drained."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    token = plain.folder / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    listen = f'listen = "{address}"\ntoken-file = "{token}"\n[host]'
    engines = "[resource]\nengine-devices = { slurm = {} }\n"
    plain.configure(engines + AGENTS + gpus(), BASE.replace("[host]", listen))
    await plain.start()
    await plain.running(kernel_id="alive", slots={"cpu": 0, "mem": "16m"})
    claimed = await plain.call("POST", "/v1/agents/agent-1/claims", CLAIM)
    assert claimed.status == 201, claimed.content
    document = await plain.get("/v1/openapi.json")
    return Documented(f"http://{address}", document, lambda _: KNOWN)


async def test_no_documented_request_breaks_the_daemon(node: Documented, plain: Daemon) -> None:
    reached = await asyncio.to_thread(fuzzed, node)
    for kernel in await plain.get("/v1/kernels"):
        await plain.call("DELETE", f"/v1/kernels/{kernel['kernel_id']}?timeout=0")
    never = node.operations.keys() - reached.keys() - node.streams
    assert never <= {*NOT_NOW, "delete_kernel", "delete_claim"}, never
    assert reached["create_kernel_of_agent"] >= 3


async def test_a_generated_client_works_for_every_route(node: Documented, tmp_path: Path) -> None:
    with generated(node.document, tmp_path, "generated_agentd") as package:
        answers = await asyncio.to_thread(called, node, package)
    assert answers.keys() == node.operations.keys()
    assert {name: status for name, status in answers.items() if status >= 500} == {}
    good = {name for name, status in answers.items() if status < 300}
    assert node.operations.keys() - good <= {*NOT_NOW, "exec_kernel"}
