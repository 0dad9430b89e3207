"""Agents with mounts, networks, credentials and groups of their own."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from agentd.config.runtimes import DockerSettings
from agentd.core.kernel.edits import Mount
from agentd.core.kernel.plan import KernelPlan
from agentd.errors import AgentdError
from agentd.runtimes.docker.runtime import DockerRuntime
from contracts.test_runtime import plan
from runtimes.docker.fake_engine import FakeEngine


class Node:
    """A runtime whose engine refuses each create with 404 until an image was pulled."""

    def __init__(self, engine: FakeEngine, folder: Path) -> None:
        self.engine = engine
        self.pulled: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        engine.answer = self._answer
        for name in ("a", "public"):
            (folder / name).mkdir()
            (folder / f"{name}.json").write_text(json.dumps({"auths": {"r.example": login(name)}}))
        settings = {
            "socket": str(engine.path),
            "network": "public",
            "allowed-mounts": [str(folder / "public")],
            "allowed-networks": ["jobs"],
            "registry-auth": str(folder / "public.json"),
        }
        self.public = DockerSettings.model_validate(settings)
        own = {
            "network": "net-a",
            "allowed_mounts": (folder / "a",),
            "allowed_networks": ("jobs-a",),
            "registry_auth": folder / "a.json",
            "allowed_groups": (2000,),
        }
        self.own = {"a": self.public.model_copy(update=own)}
        self.runtime = DockerRuntime("n", self.public, None, self.own)

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path.endswith("/images/create"):
            auth = request.headers.get("X-Registry-Auth", "")
            self.pulled.append(json.loads(base64.urlsafe_b64decode(auth))["username"])
            await self.gate.wait()
            return web.Response(text='{"status": "Status: done"}\n')
        if request.path.endswith("/containers/create"):
            self.sent.append(await request.json())
            status = 500 if self.pulled else 404
            return web.json_response({"message": "no"}, status=status)
        return web.json_response({})

    async def create(self, agent_id: str, **options: Any) -> None:
        """Create a kernel, which the engine refuses after the pull."""
        with pytest.raises(AgentdError):
            await self.runtime.create(planned(agent_id, options=options), lambda *_: None)

    async def problems(self, agent_id: str, **spec: Any) -> list[str]:
        found = await self.runtime.validate_spec(planned(agent_id, **spec).spec)
        return [str(problem) for problem in found]


def login(name: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{name}:secret".encode()).decode()}


def planned(agent_id: str, **spec: Any) -> KernelPlan:
    made = plan("true", **spec)
    return replace(made, spec=replace(made.spec, agent_id=agent_id, image="r.example/i:1"))


@pytest.fixture
async def node(fake_engine: FakeEngine, folder: Path) -> AsyncIterator[Node]:
    made = Node(fake_engine, folder)
    yield made
    await made.runtime.close()


async def test_container_is_made_with_its_agent_s_means(node: Node, folder: Path) -> None:
    await node.create("a", groups=[2000])
    await node.create("b")
    host_a, host_b = (sent["HostConfig"] for sent in node.sent[-2:])
    assert (host_a["NetworkMode"], host_a["GroupAdd"]) == ("net-a", ["2000"])
    assert (host_b["NetworkMode"], host_b["GroupAdd"]) == ("public", [])


async def test_means_of_other_agents_are_refused(node: Node, folder: Path) -> None:
    assert await node.problems("a", options={"network": "jobs-a", "groups": [2000]}) == []
    assert await node.problems("b", options={"network": "jobs"}) == []
    assert await node.problems("a", options={"network": "public"}) == [
        "network: invalid network 'public': expected one of net-a, jobs-a"
    ]
    assert await node.problems("b", options={"network": "net-a", "groups": [2000]}) == [
        "network: invalid network 'net-a': expected one of public, jobs",
        "groups.0: group 2000 is not allowed; allowed-groups: none",
    ]
    mounts = {name: (Mount(str(folder / name), "/data"),) for name in ("a", "public")}
    assert await node.problems("a", mounts=mounts["a"]) == []
    assert await node.problems("b", mounts=mounts["public"]) == []
    for agent_id, name, allowed in (("a", "public", "a"), ("b", "a", "public")):
        (problem,) = await node.problems(agent_id, mounts=mounts[name])
        assert problem.startswith(
            f"mounts.0.source: {folder / name} is not below an allowed folder"
        )
        assert problem.endswith(f"allowed-mounts: {folder / allowed}")


async def test_no_agent_waits_for_a_pull_with_another_s_login(node: Node) -> None:
    """Otherwise the pull of an agent without rights would succeed with those of another."""
    node.gate.clear()
    agents = ("a", "a", "b", "c")
    creates = [asyncio.create_task(node.create(agent)) for agent in agents]
    async with asyncio.timeout(10):
        while len(node.sent) < len(agents) or len(node.pulled) < 2:
            await asyncio.sleep(0.01)
    node.gate.set()
    await asyncio.gather(*creates)
    assert sorted(node.pulled) == ["a", "public"]


async def test_reload_replaces_the_means_of_agents(node: Node) -> None:
    node.runtime.update_settings(node.public, {"b": node.own["a"]})
    assert await node.problems("b", options={"network": "jobs-a"}) == []
    assert await node.problems("a", options={"network": "jobs-a"}) == [
        "network: invalid network 'jobs-a': expected one of public, jobs"
    ]
