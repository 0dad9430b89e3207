"""A gateway acts for its callers: at the node, all is as if they had called themselves."""

import json
import os

import aiohttp
import pytest

from agentd.core.access import Caller, Role
from end_to_end.test_tokens import Tokens
from support.daemon import Answer, Daemon

TEAM = Caller("team-x", Role.AGENT, frozenset({"team-a"}))
SLEEP = {"command": ["sleep", "1000"], "slots": {"cpu": 0, "mem": "1m"}}


@pytest.fixture
async def node(plain: Daemon) -> Tokens:
    made = Tokens(plain)
    made.add("gate")
    made.add("boss")
    gate = made.entry("gate", "admin") + "gateway = true\n"
    made.configure(gate, made.entry("boss", "admin"))
    await plain.start()
    return made


async def ask(node: Tokens, caller: Caller | str, path: str = "/v1/whoami") -> Answer:
    """Ask as an operator on the main socket that acts for somebody."""
    text = caller if isinstance(caller, str) else caller.to_text()
    return await node.daemon.call("GET", path, headers={"Agentd-Caller": text})


async def test_caller_behind_a_gateway_has_its_own_rights(node: Tokens) -> None:
    shown = (await ask(node, TEAM)).json
    assert (shown["name"], shown["role"], shown["agents"]) == ("team-x", "agent", ["team-a"])
    await node.daemon.running("secret-team", kernel_id="theirs", **SLEEP)
    assert (await ask(node, TEAM, "/v1/kernels/theirs")).json["code"] == "UnknownKernel"
    assert [row["agent_id"] for row in (await ask(node, TEAM, "/v1/agents")).json] == ["team-a"]
    headers = {"Agentd-Caller": TEAM.to_text()}
    made = await node.daemon.create("team-a", kernel_id="mine", headers=headers, **SLEEP)
    assert (made.status, made.json["created_by"]) == (201, "team-x")
    refused = await node.daemon.create("secret-team", kernel_id="no", headers=headers, **SLEEP)
    assert refused.json["code"] == "UnknownAgent"
    refused = await node.daemon.create("team-a", kernel_id="slurm-7", headers=headers, **SLEEP)
    assert refused.json["code"] == "Forbidden"
    reader = Caller("eye", Role.READ).to_text()
    refused = await node.daemon.create("team-a", headers={"Agentd-Caller": reader}, **SLEEP)
    assert refused.json["code"] == "Forbidden"
    line = next(
        line for line in node.daemon.log.splitlines() if "rpc.call" in line and "mine" in line
    )
    said = json.loads(line)
    assert (said["caller"], said["via"], said["uid"]) == ("team-x", "agentd", os.geteuid())


async def test_only_a_gateway_can_act_for_others(node: Tokens) -> None:
    boss = Caller("root", Role.ADMIN).to_text()
    for name, status in (("gate", 200), ("boss", 403)):
        assert (await node.get(name, headers={"Agentd-Caller": boss})).status == status
    refused = await node.get("boss", headers={"Agentd-Caller": boss})
    assert refused.json["roles"] == ["a token with gateway = true", "the main socket"]
    assert (await node.get(None, headers={"Agentd-Caller": boss})).status == 401


@pytest.mark.parametrize(
    "text",
    ["", "team-a", "[]", '{"name": "x"}', '{"name": "x", "role": "root"}',
     '{"name": "x", "role": "agent"}', '{"name": "x", "role": "agent", "agents": []}',
     '{"name": "x", "role": "admin", "agents": ["a"]}', '{"name": "a b", "role": "read"}',
     '{"name": "x\\nrpc.call", "role": "read"}', "[" * 5000],
)  # fmt: skip
async def test_impossible_caller_is_refused(node: Tokens, text: str) -> None:
    answer = await ask(node, text)
    assert (answer.status, answer.json["code"]) == (422, "InvalidRequest")
    assert answer.json["errors"][0]["where"] == "Agentd-Caller"


async def test_revoked_gateway_loses_its_callers_streams(node: Tokens) -> None:
    headers = {"Agentd-Caller": TEAM.to_text()}
    async with node.stream("gate", "/v1/events", headers) as events:
        assert (await events.content.readline()) == b": agentd\n"
        node.configure(node.entry("boss", "admin"))
        node.daemon.reload()
        with pytest.raises(aiohttp.ClientPayloadError):
            await events.content.read()
    assert (await node.get("gate", headers=headers)).status == 401


def test_a_caller_is_named_as_it_is_read() -> None:
    gate = Caller("gate", Role.ADMIN)
    for caller in (TEAM, Caller("eye", Role.READ), Caller("all", Role.ADMIN)):
        found = Caller.from_text(caller.to_text(), gate)
        assert (found.name, found.role, found.agents) == (caller.name, caller.role, caller.agents)
        assert found.via == "gate"
        assert json.loads(caller.to_text()).keys() == {"name", "role", "agents"}
