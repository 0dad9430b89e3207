"""agentd behind nginx, configured as the page about proxies says."""

import asyncio
import os
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path

import aiohttp
import pytest

from agentd.client import AsyncClient
from agentd.client.tls import client_tls
from agentd.errors import Unreachable
from end_to_end.nginx import Nginx, block
from end_to_end.prometheus import free_port
from end_to_end.test_exec import ran
from support.certificates import certificate
from support.daemon import AGENTS, BASE, Daemon, gpus

pytestmark = pytest.mark.needs("nginx", "openssl")
NAMES = ("-addext", "subjectAltName=DNS:localhost,DNS:gpu.example.com,DNS:node-1.example.com")
BIN = Path(sys.executable).parent
ADMIN = "of-an-administrator"

DEFAULTS = """
server {
    listen 443 ssl;
    ssl_certificate /etc/nginx/gpu.crt;
    ssl_certificate_key /etc/nginx/gpu.key;
    location / { proxy_pass http://127.0.0.1:6001; }
}
"""
"""A proxy that nobody has configured any further: HTTP/1.0 to agentd, and buffers."""


class Proxied:
    """A node, the nginx before it, and what a client of it needs."""

    def __init__(self, daemon: Daemon, kind: str) -> None:
        self.daemon = daemon
        self.token = daemon.folder / "token"
        self.token.write_text(f"{ADMIN}\n")
        self.token.chmod(0o600)
        self.cert, self.key = certificate(daemon.folder, *NAMES)
        self.tls = client_tls(cafile=str(self.cert))
        port = free_port()
        rpc = f'[rpc]\nlisten = "127.0.0.1:{port}"\n'
        text = f'[[rpc.tokens]]\nname = "ann"\nfile = "{self.token}"\nrole = "admin"\n'
        replaced = {
            "/etc/nginx/gpu.crt": self.cert,
            "/etc/nginx/gpu.key": daemon.folder / "nginx.key",
        }
        content = DEFAULTS if kind == "defaults" else block(kind)
        if kind in ("loopback", "defaults"):
            replaced["127.0.0.1:6001"] = f"127.0.0.1:{port}"
        elif kind == "tls":
            content = block("loopback").partition("upstream")[0] + content
            rpc += f'tls-cert = "{self.cert}"\ntls-key = "{self.key}"\n'
            replaced["node-1.example.com:6001"] = f"127.0.0.1:{port}"
            replaced["/etc/nginx/agentd-ca.crt"] = self.cert
        else:
            path = daemon.folder / "monitor.sock"
            group = "nogroup" if os.geteuid() == 0 else ""
            line = f'group = "{group}"\n' if group else ""
            text += f'[[rpc.sockets]]\npath = "{path}"\n{line}role = "read"\n'
            users = daemon.folder / "users"
            users.write_text("ann:{PLAIN}password\n")
            replaced["/run/agentd/monitor.sock"] = path
            replaced["/etc/nginx/monitor.users"] = users
        daemon.configure(AGENTS + gpus(1) + text, BASE.replace("[rpc]\n", rpc))
        (daemon.folder / "nginx.key").write_bytes(self.key.read_bytes())
        self.nginx = Nginx(content, replaced)

    async def start(self) -> None:
        await self.daemon.start()
        await self.nginx.start()

    @property
    def client(self) -> AsyncClient:
        return AsyncClient(url=self.nginx.url, token=ADMIN, tls=self.tls)


@pytest.fixture
async def proxied(plain: Daemon) -> AsyncIterator[Callable[[str], Proxied]]:
    made: list[Proxied] = []

    def make(kind: str) -> Proxied:
        made.append(Proxied(plain, kind))
        return made[0]

    yield make
    for each in made:
        await each.nginx.stop()


@pytest.mark.parametrize("kind", ["loopback", "tls", "defaults"])
async def test_streams_arrive_through_a_proxy_at_once(proxied, kind: str) -> None:
    world = proxied(kind)
    await world.start()
    go = world.daemon.folder / "go"
    script = f"echo one; while [ ! -e {go} ]; do sleep 0.05; done; echo two; sleep 1000"
    async with world.client as node, asyncio.timeout(30):
        async with node.listening() as events:
            body = {"kernel_id": "k1", "command": ["sh", "-c", script]}
            await node.create_kernel("agent-1", body)
            async for event in events:
                if event.data.get("state") == "running":
                    break
        chunks = node.logs("k1", follow=True)
        assert await anext(chunks) == b"one\n"
        go.touch()
        assert await anext(chunks) == b"two\n"
        await chunks.aclose()


@pytest.mark.parametrize("kind", ["loopback", "tls"])
async def test_proxy_passes_users_pages_and_execs_on(proxied, kind: str) -> None:
    world = proxied(kind)
    await world.start()
    await world.daemon.running(kernel_id="k1")
    async with world.client as node, asyncio.timeout(30):
        assert (await node.whoami())["name"] == "ann"
        assert await ran(node, "cat", given=b"x" * 100_000) == (0, b"x" * 100_000, b"")
    url, headers = world.nginx.url, {"Authorization": f"Bearer {ADMIN}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=world.tls)) as browser:
        async with browser.get(f"{url}/ui/") as page:
            assert (page.status, page.content_type) == (200, "text/html")
        async with browser.get(f"{url}/v1/node") as refused:
            assert refused.status == 401
        headers["Origin"] = url  # as the status page sends it
        async with browser.delete(f"{url}/v1/kernels/k1?timeout=0", headers=headers) as deleted:
            assert deleted.status == 204
        large = BytesIO(b"{" + b" " * (1 << 20) + b"}")
        path = f"{url}/v1/agents/agent-1/kernels"
        async with browser.post(path, data=large, headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (413, "BodyTooLarge")


async def test_commands_work_through_a_proxy(proxied) -> None:
    world = proxied("loopback")
    await world.start()
    assert (await world.daemon.create(kernel_id="k1", command=["echo", "done"])).status == 201
    env = {**os.environ, "AGENTD_URL": world.nginx.url, "AGENTD_TOKEN_FILE": str(world.token)}
    env["SSL_CERT_FILE"] = str(world.cert)

    async def agentctl(*words: str) -> tuple[int | None, bytes]:
        process = await asyncio.create_subprocess_exec(
            BIN / "agentctl", *words, env=env,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), 30)
        return process.returncode, output

    status, output = await agentctl("status")
    assert (status, f"node {world.daemon.node}" in output.decode()) == (0, True), output
    assert await agentctl("logs", "-f", "k1") == (0, b"done\n")
    await world.daemon.stop()
    status, output = await agentctl("status")
    assert (status, output) == (1, b"agentctl: Unreachable: a proxy answered: 502 Bad Gateway\n")
    with pytest.raises(Unreachable, match="502 Bad Gateway"):
        async with world.client as node:
            await node.node()
    await world.daemon.start()


async def test_socket_behind_a_proxy_has_its_own_role(proxied) -> None:
    world = proxied("socket")
    await world.start()
    url = world.nginx.url
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=world.tls)) as browser:

        async def status(method: str, path: str, **headers: str) -> int:
            async with browser.request(method, f"{url}{path}", headers=headers) as answer:
                return answer.status

        assert await status("GET", "/v1/node") == 401
        known = {"Authorization": f"Basic {b64encode(b'ann:password').decode()}"}
        assert await status("GET", "/v1/node", **known) == 200
        assert await status("POST", "/v1/reload", **known, Origin=url) == 403
        assert await status("GET", "/v1/node", **known, Origin="https://elsewhere.org") == 403
