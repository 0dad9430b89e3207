"""TLS of both clients to a server with a private CA."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from agentd.client import AsyncClient, Client
from agentd.errors import Unreachable
from support.certificates import certificate


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A server whose certificates are without key usage, as plain openssl makes them."""
    for name in ("ca", "other", "server"):
        (tmp_path / name).mkdir()
    ca, key = certificate(tmp_path / "ca")
    certificate(tmp_path / "other")
    issued = ["-CA", str(ca), "-CAkey", str(key), "-addext", "subjectAltName=DNS:localhost"]
    pair = certificate(tmp_path / "server", *issued, "-addext", "basicConstraints=CA:FALSE")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pair)

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"id": "n1"})

    app = web.Application()
    app.router.add_get("/v1/node", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield f"https://localhost:{runner.addresses[0][1]}"
    await runner.cleanup()


async def node_ids(url: str) -> list[str]:
    async with AsyncClient(url=url) as client:
        return [(await client.node())["id"], (await asyncio.to_thread(Client(url=url).node))["id"]]


async def test_clients_trust_private_ca_without_key_usage(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca/cert"))
    assert await node_ids(url) == ["n1", "n1"]
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "other/cert"))
    with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        await node_ids(url)
    with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        await asyncio.to_thread(Client(url=url).node)
