"""A gateway's lists of more kernels than one page has."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.client import Client
from agentd.http.queries import MAX_PAGE
from end_to_end.fleet.fleet_world import GatewayProgram, World
from support.daemon import AGENTS, BASE, Daemon
from support.fork_server import run
from support.saved_records import save_claims, save_kernels

KERNELS = [*(f"a{number:04}" for number in range(600)), *(f"b{number:04}" for number in range(401))]


@pytest.fixture
async def fleet(world: World, tmp_path: Path) -> AsyncIterator[tuple[GatewayProgram, list[str]]]:
    """A gateway over two nodes with 1,001 ended kernels together, and 1,001 claims on the first."""
    nodes = []
    for name, count in (("a", 600), ("b", 401)):
        folder = tmp_path / name
        folder.mkdir()
        daemon = Daemon(folder, "process")
        daemon.node = f"{name}-{uuid.uuid4().hex[:12]}"
        save_kernels(daemon, count, name)
        if name == "a":
            save_claims(daemon, MAX_PAGE + 1)
        daemon.configure(AGENTS, BASE)
        nodes.append(daemon)
    try:
        await asyncio.gather(*(daemon.start() for daemon in nodes))
        listed = [f"unix:{daemon.folder}/agentd.sock" for daemon in nodes]
        program = world.gateway(f"[fleet]\nnodes = {json.dumps(listed)}\n")
        ids = [daemon.node for daemon in nodes]
        await program.until(dict.fromkeys(ids, "ready"))
        yield program, ids
    finally:
        await asyncio.gather(*(daemon.close() for daemon in nodes))


async def test_each_client_of_a_gateway_reads_all_pages(fleet) -> None:
    gateway, _ = fleet
    page = await gateway.call("GET", "/v1/kernels")
    assert len(page.json) == MAX_PAGE
    client = Client(gateway.socket)
    rows = await asyncio.to_thread(client.kernels)
    assert [row["kernel_id"] for row in rows] == KERNELS
    words = ["agentctl", "--fleet", f"unix:{gateway.socket}", "ls", "-q"]
    done = await asyncio.to_thread(run, *words)
    assert done.stdout.split() == KERNELS, done.stderr


async def test_link_of_a_nodes_list_leads_through_the_gateway(fleet) -> None:
    gateway, (node, _) = fleet
    page = await gateway.call("GET", f"/v1/nodes/{node}/claims")
    assert len(page.json) == MAX_PAGE
    link = page.headers["Link"]
    assert link.startswith(f"</v1/nodes/{node}/claims?after=")
    last = await gateway.get(link[1:].partition(">")[0])
    assert [claim["claim_id"] for claim in last] == [f"c{MAX_PAGE:04}"]
