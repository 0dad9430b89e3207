"""Two gateways behind nginx, configured as the page about balancers says."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from end_to_end.fleet.fleet_world import GatewayProgram, World
from end_to_end.fleet.network import Proxy
from end_to_end.nginx import PAGES, Nginx, block
from end_to_end.prometheus import free_port
from support.certificates import certificate
from support.waiting import until

pytestmark = pytest.mark.needs("nginx", "openssl", "etcd")
PAGE = "run-behind-a-balancer.md"
BIN = Path(sys.executable).parent
NAMES = ("-addext", "subjectAltName=DNS:localhost,DNS:gateway.example.com,DNS:fleet.example.com")
TOKEN = "a-token-of-an-administrator"  # noqa: S105


@dataclass
class Balanced:
    """Gateways behind nginx, which reach their one node through a proxy."""

    world: World
    gateways: list[GatewayProgram]
    nginx: Nginx
    node_proxy: Proxy
    environ: dict[str, str]

    async def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the page."""
        text = command.replace("https://fleet.example.com", self.nginx.url)
        return await asyncio.to_thread(
            subprocess.run,
            ["sh", "-c", text],
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(params=["1h", "1s"])
async def balanced(world: World, request: pytest.FixtureRequest) -> AsyncIterator[Balanced]:
    """Gateways behind the nginx of the page, or one that cuts after a silent second."""
    await world.start_etcd()
    (node,) = await world.start_nodes("none")
    proxy = await world.proxy(node)
    world.join(node, url=proxy.endpoint)
    cert, key = certificate(world.folder, *NAMES)
    token = world.folder / "token"
    token.touch(0o600)
    token.write_text(f"{TOKEN}\n")
    ports, gateways = [free_port(), free_port()], []
    for port in ports:
        listen = f'listen = "127.0.0.1:{port}"\ntls-cert = "{cert}"\ntls-key = "{key}"\n'
        rpc = f'[rpc]\ntoken-file = "{token}"\n'
        gateways.append(world.gateway(gateway=listen, rpc=rpc))
    for gateway in gateways:
        await gateway.until({node: "ready"})
    (world.folder / "fleet.key").write_bytes(key.read_bytes())
    replaced = {
        "/etc/nginx/fleet.crt": cert,
        "/etc/nginx/fleet.key": world.folder / "fleet.key",
        "/etc/nginx/agentd-ca.crt": cert,
        "proxy_read_timeout 1h": f"proxy_read_timeout {request.param}",
        **{f"gateway-{n}.example.com:7001": f"127.0.0.1:{p}" for n, p in enumerate(ports, 1)},
    }
    nginx = Nginx(block("gateways", PAGE), replaced)
    await nginx.start()
    environ = {"PATH": f"{BIN}:/usr/bin:/bin", "SSL_CERT_FILE": str(cert), "TOKEN": TOKEN}
    environ |= {"AGENTCTL_FLEET": nginx.url, "AGENTD_TOKEN_FILE": str(token)}
    yield Balanced(world, gateways, nginx, proxy, environ)
    await nginx.stop()


@pytest.mark.parametrize("balanced", ["1h"], indirect=True)
async def test_page_about_balancers_can_be_followed(balanced: Balanced) -> None:
    text = (PAGES / PAGE).read_text()
    lines = [line.strip() for line in text.splitlines()]
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    commands = [c for c in commands if not c.startswith("export ")]
    assert len(commands) == 7
    for command in commands:
        if command.startswith("agentctl rm"):
            await balanced.gateways[0].stop(signal.SIGKILL)
        done = await balanced.shell(command.replace("curl ", "curl -sS --fail-with-body "))
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if "respond-async" in command:
            assert json.loads(done.stdout)["kernel_id"] == "try-2"
    kernels = {name: len(nodes) for name, nodes in (await balanced.world.census()).items()}
    assert kernels == {"try-2": 1, "try-3": 1}


@pytest.mark.parametrize("balanced", ["1s"], indirect=True)
@pytest.mark.parametrize("options", ["", "--id given"], ids=["own id", "given id"])
async def test_create_beyond_the_idle_timeout_is_one_kernel(
    balanced: Balanced, options: str
) -> None:
    """The node answers only after the balancer has cut the create several times."""
    assert (await balanced.gateways[0].create(kernel_id="first")).status == 201
    balanced.node_proxy._passes.clear()
    command = f"agentctl create -o name {options} -- sleep 1000"
    creating = asyncio.create_task(balanced.shell(command))
    await until(lambda: errors(balanced.nginx).count("upstream timed out"), lambda cuts: cuts >= 3)
    assert not creating.done()
    balanced.node_proxy._passes.set()
    done = await creating
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip()
    assert name == "given" if options else name.startswith("k-")
    assert {*(await balanced.world.census())} == {"first", name}


def errors(nginx: Nginx) -> str:
    file = nginx.prefix / "error.log"
    return file.read_text() if file.is_file() else ""
