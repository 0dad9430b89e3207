"""A node that reports but cannot be used from here: reason, metric, log and command line agree."""

import asyncio
import ssl

from end_to_end.fleet.fleet_world import World
from support import fork_server
from support.certificates import certificate_that_ends
from support.waiting import until

SOON = {"agentd_fleet.credentials.RETRY_S": 0.2}


async def test_node_with_expired_certificate_is_unusable_until_renewed(world: World) -> None:
    await world.start_etcd()
    (node,) = await world.start_nodes("none")
    (world.folder / "pair").mkdir()
    cert, key = certificate_that_ends(world.folder / "pair", -1)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    proxy = await world.proxy(node, tls)
    world.join(node, url=proxy.endpoint)
    fleet = world.kept_in
    gateway = world.gateway(f'{fleet}ca = "{cert}"\n', deadlines=SOON)
    await gateway.until({node: "ready"})
    usable = f'agentd_fleet_node_usable{{node_id="{node}"}}'

    async def is_usable() -> bool:
        metrics = (await gateway.call("GET", "/metrics")).content.decode()
        return f"{usable} 1.0" in metrics

    refused = await gateway.create(kernel_id="k1")
    assert (refused.status, refused.json["code"]) == (503, "NodeUnavailable"), refused.content
    shown = await gateway.get(f"/v1/nodes/{node}")
    assert (shown["state"], shown["reason"]) == ("ready", "unreachable: certificate has expired")
    assert not await is_usable()
    words = ("agentctl", "--fleet", f"unix:{gateway.socket}", "fleet", "nodes")
    listed = await asyncio.to_thread(fork_server.run, *words)
    assert "unreachable: certificate has expired" in listed.stdout
    assert gateway.log.count("certificate has expired") == 1
    tls.load_cert_chain(*certificate_that_ends(cert.parent, 100))
    await gateway.until_logged("credential.replaced")
    await until(is_usable)
    assert (await gateway.create(kernel_id="k1")).status == 201
    assert (await gateway.get(f"/v1/nodes/{node}"))["reason"] == ""
