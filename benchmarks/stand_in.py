"""An engine stand-in that answers at once, and counts what it is asked.

Speaks as much of the Engine API as one create needs, on a unix socket, in a process of
its own, so that what is measured is agentd alone.
"""

import asyncio
import json
import sys
from hashlib import sha256
from typing import Any

from aiohttp import web

containers: dict[str, dict[str, Any]] = {}
"""By name and by id."""
calls: list[str] = []
listeners: set[web.StreamResponse] = set()
requests: list[dict[str, Any]] = []
"""The body of the latest create."""


def answer(content: object, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(content), status=status, content_type="application/json")


async def version(_: web.Request) -> web.Response:
    calls.append("version")
    return answer({"ApiVersion": "1.41", "Os": "linux", "Arch": "amd64"})


async def info(_: web.Request) -> web.Response:
    calls.append("info")
    return answer({"MemoryLimit": True, "CPUSet": True, "PidsLimit": True})


async def emit_event(action: str, inspection: dict[str, Any]) -> None:
    """Tell of an event, as an engine does before it answers."""
    attributes = {"name": inspection["Name"][1:], **inspection["Config"]["Labels"]}
    event = {"Action": action, "Actor": {"ID": inspection["Id"], "Attributes": attributes}}
    for listener in list(listeners):
        try:
            await listener.write(json.dumps(event).encode() + b"\n")
        except ConnectionError:  # its daemon was started anew
            listeners.discard(listener)


async def create(request: web.Request) -> web.Response:
    calls.append("create")
    name, config = request.query["name"], await request.json()
    requests[:] = [config]
    inspection = {
        "Id": sha256(name.encode()).hexdigest(),
        "Name": f"/{name}",
        "Config": {"Labels": config["Labels"]},
        "HostConfig": config["HostConfig"],
        "State": {"Status": "created", "ExitCode": 0, "Pid": 0},
    }
    containers[name] = containers[inspection["Id"]] = inspection
    await emit_event("create", inspection)
    return answer({"Id": inspection["Id"], "Warnings": []}, 201)


def container(request: web.Request) -> dict[str, Any]:
    inspection = containers.get(request.match_info["id"])
    if inspection is None:
        text = '{"message": "No such container"}'
        raise web.HTTPNotFound(text=text, content_type="application/json")
    return inspection


async def start(request: web.Request) -> web.Response:
    calls.append("start")
    inspection = container(request)
    inspection["State"] = {
        "Status": "running",
        "Pid": 0,
        "ExitCode": 0,
        "StartedAt": "2026-01-01T00:00:00.5Z",
    }
    await emit_event("start", inspection)
    return web.Response(status=204)


async def show(request: web.Request) -> web.Response:
    calls.append("inspect")
    return answer(container(request))


async def stop(request: web.Request) -> web.Response:
    calls.append("stop")
    container(request)["State"] |= {"Status": "exited", "ExitCode": 143}
    await emit_event("die", container(request))
    return web.Response(status=204)


async def remove(request: web.Request) -> web.Response:
    calls.append("remove")
    inspection = container(request)
    del containers[inspection["Name"][1:]], containers[inspection["Id"]]
    await emit_event("destroy", inspection)
    return web.Response(status=204)


async def listing(_: web.Request) -> web.Response:
    calls.append("list")
    inspections = {c["Id"]: c for c in containers.values()}.values()
    entries = [{"Id": c["Id"], "Names": [c["Name"]], **c["Config"]} for c in inspections]
    return answer(entries)


async def events(request: web.Request) -> web.StreamResponse:
    calls.append("events")
    response = web.StreamResponse()
    await response.prepare(request)
    listeners.add(response)
    try:
        await asyncio.Event().wait()
    finally:
        listeners.discard(response)
    return response


async def counts(_: web.Request) -> web.Response:
    count_by_call = {name: calls.count(name) for name in dict.fromkeys(calls)}
    calls.clear()
    return answer(count_by_call)


async def last_create(_: web.Request) -> web.Response:
    return answer(requests[-1])


def main() -> None:
    app = web.Application()
    app.router.add_get("/version", version)
    app.router.add_get("/counted", counts)
    app.router.add_get("/last_create", last_create)
    for prefix in ("/v1.41",):
        app.router.add_get(f"{prefix}/version", version)
        app.router.add_get(f"{prefix}/info", info)
        app.router.add_post(f"{prefix}/containers/create", create)
        app.router.add_get(f"{prefix}/containers/json", listing)
        app.router.add_get(f"{prefix}/events", events)
        app.router.add_post(f"{prefix}/containers/{{id}}/start", start)
        app.router.add_post(f"{prefix}/containers/{{id}}/stop", stop)
        app.router.add_get(f"{prefix}/containers/{{id}}/json", show)
        app.router.add_delete(f"{prefix}/containers/{{id}}", remove)
    web.run_app(app, path=sys.argv[1], print=None, access_log=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
