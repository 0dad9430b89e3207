"""The least that a daemon of this kind can cost: an aiohttp server that passes one create on.

Takes a create on a unix socket, makes the same three calls to the engine as agentd does, and
answers with what the last one said. Decides nothing, remembers nothing.

    python benchmarks/relay.py SOCKET ENGINE_SOCKET
"""

import json
import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web


async def client(app: web.Application) -> AsyncIterator[None]:
    connector = aiohttp.UnixConnector(sys.argv[2], limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        app["session"] = session
        yield


async def create(request: web.Request) -> web.Response:
    body = await request.json()
    session, engine = request.app["session"], "http://docker/v1.41/containers"
    config = {"Image": body["image"], "Cmd": body["command"], "Labels": {}, "HostConfig": {}}
    name = f"relay-{body['kernel_id']}"
    async with session.post(f"{engine}/create", params={"name": name}, json=config) as response:
        made = await response.json()
    async with session.post(f"{engine}/{made['Id']}/start") as response:
        await response.read()
    async with session.get(f"{engine}/{made['Id']}/json") as response:
        shown = await response.json()
    return web.Response(body=json.dumps(shown), status=201, content_type="application/json")


async def remove(request: web.Request) -> web.Response:
    engine = "http://docker/v1.41/containers"
    name = f"relay-{request.match_info['kernel']}"
    async with request.app["session"].delete(f"{engine}/{name}") as response:
        return web.Response(status=response.status)


def main() -> None:
    app = web.Application()
    app.cleanup_ctx.append(client)
    app.router.add_post("/v1/agents/{agent}/kernels", create)
    app.router.add_delete("/v1/kernels/{kernel}", remove)
    web.run_app(app, path=sys.argv[1], print=None, access_log=None)


if __name__ == "__main__":
    main()
