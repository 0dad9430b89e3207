"""Teams that share a node: tests of sentences that tests/test_trust.py lists."""

import os
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentd.core.claim.claim import MAX_CLAIMS
from agentd.http.streaming.streaming_responses import MAX_STREAMS
from end_to_end.test_access import call
from support.daemon import AGENTS, Answer, Daemon, gpus
from support.saved_records import save_claims

SOCKET = """
[[rpc.sockets]]
path = "{folder}/team-{number}.sock"
role = "agent"
agents = ["agent-{number}"]
"""
LIMITED = """
[[agents]]
id = "agent-1"
resource = {{ limits = {{ cuda = {} }} }}
[[agents]]
id = "agent-2"
resource = {{ limits = {{ cuda = {} }} }}
"""


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[Daemon]:
    """A node on the process runtime that has not been started."""
    made = Daemon(folder, "process")
    yield made
    await made.close()


async def start(node: Daemon, text: str) -> None:
    """Start a node with a socket for each team."""
    sockets = "".join(SOCKET.format(folder=node.folder, number=number) for number in (1, 2))
    await node.start(f"{text}{sockets}")


async def create(node: Daemon, team: int, **body: Any) -> Answer:
    content = {"command": ["sleep", "1000"], **body}
    return await call(node, f"team-{team}", "POST", f"/v1/agents/agent-{team}/kernels", content)


async def test_team_takes_shared_capacity_from_another(node: Daemon) -> None:
    await start(node, AGENTS + gpus(1, "shares"))
    assert (await create(node, 1, slots={"cuda.shares": "1"})).status == 201
    refused = await create(node, 2, slots={"cuda.shares": "0.5"})
    assert (refused.status, refused.json["code"]) == (409, "InsufficientResource")


async def test_team_takes_no_part_that_is_guaranteed(node: Daemon) -> None:
    await start(node, LIMITED.format("0.5", "0.5") + gpus(1, "shares"))
    refused = await create(node, 1, slots={"cuda.shares": "0.75"})
    assert (refused.status, refused.json["code"]) == (409, "InsufficientResource")
    assert (await create(node, 1, slots={"cuda.shares": "0.5"})).status == 201
    assert (await create(node, 2, slots={"cuda.shares": "0.5"})).status == 201


async def test_team_takes_no_device_of_another(node: Daemon) -> None:
    split = '[resource]\nallocation-mode = "auto-split"\n'
    await start(node, f"{split}{AGENTS}{gpus(2)}")
    refused = await create(node, 1, slots={"cuda.device": 2})
    assert (refused.status, refused.json["code"]) == (409, "InsufficientResource")
    assert (await create(node, 1, slots={"cuda.device": 1})).status == 201
    assert (await create(node, 2, slots={"cuda.device": 1})).status == 201


async def test_team_has_any_number_of_small_kernels(node: Daemon) -> None:
    await start(node, AGENTS + gpus(1))
    for _ in range(20):
        assert (await create(node, 1, slots={"cpu": 0, "mem": "1m"})).status == 201


async def test_kernels_of_teams_run_as_one_user_by_default(node: Daemon) -> None:
    await start(node, AGENTS + gpus(1))
    kernels = [(await create(node, team)).json for team in (1, 2)]
    assert all("separation" in kernel["not_enforced"] for kernel in kernels)
    users = {Path(f"/proc/{kernel['pid']}").stat().st_uid for kernel in kernels}
    assert len(users) == 1


async def claim(node: Daemon, team: int, claim_id: str, holder: dict[str, Any]) -> Answer:
    body = {"claim_id": claim_id, "holder": holder, "slots": {"mem": "1m"}}
    return await call(node, f"team-{team}", "POST", f"/v1/agents/agent-{team}/claims", body)


async def test_claims_above_a_new_bound_stay(node: Daemon) -> None:
    bound = MAX_CLAIMS // 3
    await start(node, AGENTS + gpus(1))
    await node.stop()
    save_claims(node, bound + 3)
    third = '[[agents]]\nid = "agent-3"\n'
    await start(node, f"{AGENTS}{third}{gpus(1)}")
    refused = await claim(node, 1, "mine", {"name": "x"})
    assert (refused.status, refused.json["code"]) == (429, "TooManyClaims")
    maximum = f"agent agent-1 has {bound + 3} claims, the maximum is {bound}"
    assert refused.json["detail"] == maximum
    assert (await call(node, "team-1", "GET", "/v1/claims/c0000")).status == 200
    assert (await claim(node, 2, "theirs", {"name": "x"})).status == 201


async def test_pid_holders_of_a_team_leave_descriptors(node: Daemon) -> None:
    await start(node, AGENTS + gpus(1))
    assert node.process is not None
    descriptors = 256
    resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
    held = {"pid": os.getpid()}
    statuses = [(await claim(node, 1, f"c{n}", held)).status for n in range(descriptors)]
    assert statuses == [201] * (descriptors // 4) + [429] * (descriptors * 3 // 4)
    assert (await claim(node, 1, "ttl", {"ttl": 60})).status == 201
    assert (await claim(node, 2, "theirs", held)).status == 201
    assert "Traceback" not in node.log


async def test_streams_of_a_team_are_its_own(node: Daemon) -> None:
    await start(node, AGENTS + gpus(1))
    async with AsyncExitStack() as stack:

        async def follow(team: int) -> int:
            connector = aiohttp.UnixConnector(str(node.folder / f"team-{team}.sock"))
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            events = session.get("http://agentd/v1/events")
            return (await stack.enter_async_context(events)).status

        assert [await follow(1) for _ in range(MAX_STREAMS + 1)] == [*[200] * MAX_STREAMS, 429]
        assert await follow(2) == 200
