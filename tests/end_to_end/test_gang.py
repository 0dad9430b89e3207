"""A gang over three nodes: claims with a time limit, then creates from them, or nothing."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from agentd.client.asynchronous import AsyncClient
from agentd.errors import AgentdError
from support.daemon import AGENTS, Daemon, gpus

NODES = 3
WHOLE = {"cuda.device": 2}
TTL_S = 2


@pytest.fixture
async def nodes(folder: Path) -> AsyncIterator[list[Daemon]]:
    """Three daemons with two GPUs each."""
    made = []
    for number in range(NODES):
        own = folder / str(number)
        own.mkdir(mode=0o755)
        daemon = Daemon(own, "process")
        daemon.node = f"{folder.name}-{number}"
        made.append(daemon)
        await daemon.start(AGENTS + gpus(2))
    yield made
    for daemon in made:
        await daemon.close()


async def gang(nodes: list[Daemon], *, before_create: int | None = None) -> bool:
    """Claim on every node, then create on every node; release everything where one refuses.

    Kill one node after the claims, if asked.
    """
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(daemon.folder / "agentd.sock", timeout_s=5))
            for daemon in nodes
        ]
        try:
            for client in clients:
                body = {"claim_id": "gang", "holder": {"ttl": TTL_S}, "slots": WHOLE}
                await client.create_claim("agent-1", body)
            if before_create is not None:
                await nodes[before_create].stop(signal.SIGKILL)
            for client in clients:
                body = {"kernel_id": "gang", "command": ["sleep", "1000"], "claim": "gang"}
                await client.create_kernel("agent-1", body)
        except AgentdError:
            for client in clients:
                for undo in (client.delete_kernel, client.release_claim):
                    with suppress(AgentdError):
                        await undo("gang")
            return False
        return True


async def until_free(daemon: Daemon) -> None:
    async with asyncio.timeout(60):
        while (await daemon.get("/v1/agents/agent-1"))["slots"].get("cuda.device", {}).get(
            "free"
        ) != "2":
            await asyncio.sleep(0.05)


async def test_gang_runs_on_every_node(nodes: list[Daemon]) -> None:
    assert await gang(nodes)
    for daemon in nodes:
        assert await daemon.free("cuda.device") == "0"
        assert await daemon.get("/v1/claims") == []


@pytest.mark.parametrize("full", range(NODES))
async def test_node_that_refuses_leaves_the_others_free(nodes: list[Daemon], full: int) -> None:
    await nodes[full].running(kernel_id="k1", slots={"cuda.device": 1})
    assert not await gang(nodes)
    for number, daemon in enumerate(nodes):
        assert await daemon.free("cuda.device") == ("1" if number == full else "2")
        assert await daemon.get("/v1/claims") == []


@pytest.mark.parametrize("dead", range(NODES))
async def test_node_that_dies_between_leaves_nothing(nodes: list[Daemon], dead: int) -> None:
    assert not await gang(nodes, before_create=dead)
    await nodes[dead].start()
    for daemon in nodes:
        await until_free(daemon)
        assert await daemon.get("/v1/claims") == []
        assert await daemon.get("/v1/kernels") == []


async def test_scheduler_that_dies_leaves_nothing_after_the_time(nodes: list[Daemon]) -> None:
    for daemon in nodes:
        body = {"claim_id": "gang", "holder": {"ttl": TTL_S}, "slots": WHOLE}
        assert (await daemon.call("POST", "/v1/agents/agent-1/claims", body)).status == 201
    for daemon in nodes:
        await until_free(daemon)
