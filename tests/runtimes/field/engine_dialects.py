"""Engines as people have them: a proxy before an engine that answers as those do.

Each function makes an `EngineProxy` speak one dialect. Behind it is a real engine, or the stand-in
of `benchmarks/`, which has every image and starts at once.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from support.engine_proxy import Answer, EngineProxy

CREATE, PULL, INFO = "POST .*/containers/create", "POST .*/images/create", "GET .*/info$"
Edit = Callable[[dict[str, Any]], None]


def answers(content: object, status: int = 200) -> Answer:
    """Answer in the engine's place; a list is sent line by line, as the progress of a pull."""
    lines = content if isinstance(content, list) else [content]
    body = b"".join(json.dumps(line).encode() + b"\r\n" for line in lines)

    async def answer(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(body=body, status=status, content_type="application/json")

    return answer


def omits_empty_members(proxy: EngineProxy) -> None:
    """Leave out members without a value, as Engine 28 and 29 do in ever more places."""
    proxy.rule("GET .*/(json|info)", changes_answer(proxy, _without_empty), always=True)


def _without_empty(content: Any) -> None:
    for item in content if isinstance(content, list) else [content]:
        if isinstance(item, dict):
            for name in [name for name, value in item.items() if value in ("", None, [], {})]:
                del item[name]
            _without_empty(list(item.values()))


def changes_answer(proxy: EngineProxy, edit: Callable[[Any], None]) -> Answer:
    """Change what an engine answers."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        async with proxy.engine(request, body) as response:
            content = json.loads(await response.read())
            if response.status < 400:
                edit(content)
            return web.json_response(content, status=response.status)

    return answer


def pull_succeeds(proxy: EngineProxy) -> None:
    """Pull whatever is asked for, whenever the image is missing."""
    lines = [
        {"status": "Pulling from library/agentd-test", "id": "1"},
        {"status": "Download complete", "progressDetail": {}, "id": "0123456789ab"},
        {"status": "Status: Downloaded newer image for agentd-test:1"},
    ]
    proxy.rule(PULL, answers(lines), always=True)


def has_no_cpuset(proxy: EngineProxy) -> None:
    """Discard cores without an error, as an engine whose cgroup has no cpuset controller."""
    _lacks(proxy, "CPUSet", lambda host: host.update(CpusetCpus=""))


def has_no_memory_limit(proxy: EngineProxy) -> None:
    """Discard limits of memory without an error, as an engine without the memory controller."""
    _lacks(proxy, "MemoryLimit", lambda host: host.update(Memory=0, MemorySwap=0))


def _lacks(proxy: EngineProxy, member: str, discard: Edit, create: Answer | None = None) -> None:
    proxy.rule(INFO, changes_answer(proxy, lambda info: info.update({member: False})), always=True)
    create = create or proxy.change(lambda config: discard(config["HostConfig"]))
    proxy.rule(CREATE, create, always=True)


def has_no_pids_limit(proxy: EngineProxy) -> None:
    """Discard the limit of processes, as an engine without the pids controller."""
    _lacks(proxy, "PidsLimit", lambda host: host.update(PidsLimit=0))


def refuses_cpuset(proxy: EngineProxy) -> None:
    """Refuse a container with cores, as Podman without the cpuset controller."""
    text = "crun: the requested cgroup controller `cpuset` is not available"
    refuse = answers({"message": text}, 500)

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse | None:
        has_cores = json.loads(body)["HostConfig"].get("CpusetCpus")
        return await refuse(request, body) if has_cores else None

    _lacks(proxy, "CPUSet", lambda _: None, answer)


def discards_limits(proxy: EngineProxy) -> None:
    """Discard cores, and claim otherwise, as rootless Podman on cgroup v1."""
    discard = proxy.change(lambda config: config["HostConfig"].update(CpusetCpus=""))
    proxy.rule(CREATE, discard, always=True)


def answers_info_slowly(proxy: EngineProxy, gate: asyncio.Event) -> None:
    """Keep every request for `/info` waiting until a gate opens."""
    proxy.rule(INFO, proxy.stall(gate, before=True), always=True)


def finds_no_image_of_a_platform(proxy: EngineProxy) -> None:
    """Hold images whose configuration names no platform in the containerd store.

    Such an image is found only by requests that name no platform, also right after its pull.
    """
    missing = answers({"message": "No such image: agentd-test:1"}, 404)
    proxy.rule(f"{CREATE}.*platform=", missing, always=True)
    pull_succeeds(proxy)


def has_a_foreign_image(proxy: EngineProxy, platform: str = "linux/s390x") -> None:
    """Create containers of an image that is for another platform, with a warning alone."""
    warning = (
        f"The requested image's platform ({platform}) does not match the detected host platform"
        " (linux/amd64/v3) and no specific platform was requested"
    )
    edit = changes_answer(proxy, lambda content: content.update(Warnings=[warning]))
    proxy.rule(f"{CREATE}(?!.*platform=)", edit, always=True)
    pull_succeeds(proxy)
