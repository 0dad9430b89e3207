"""A fleet goes on when a log cannot be written, and a gateway ends with a vital part."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from end_to_end.fleet.fleet_world import World
from support.certificates import certificate_that_ends
from support.host_faults import LogPipe

KILLED = """
import importlib, sys
module, _, path = {name!r}.partition(":")
owner, method = path.split(".")
async def returns(*_): ...
setattr(getattr(importlib.import_module(module), owner), method, returns)
sys.argv = ["agentd-fleet", "gateway", "--config", {config!r}]
from agentd_fleet.cli import agentd_fleet
agentd_fleet()
"""
PARTS = {
    "store": "agentd_fleet.store.sqlite_store:SqliteStore.run",
    "sweep": "agentd_fleet.placement.sweep:Sweep.run",
    "reload": "agentd_fleet.credentials:GatewayCredentials.run",
}


async def test_fleet_works_without_readers_of_its_logs(world: World) -> None:
    await world.start_etcd()
    (node,) = await world.start_nodes("cuda")
    logs = [LogPipe(world.folder / f"{name}.log") for name in ("join-0", "gate-1")]
    world.join(node)
    gateway = world.gateway()
    for log in logs:
        log.end_reader()
    await gateway.until({node: "ready"})
    assert (await gateway.create(kernel_id="k1")).status == 201
    assert (await gateway.call("DELETE", "/v1/kernels/k1?timeout=0")).status == 204
    metrics = (await gateway.call("GET", "/metrics")).content.decode()
    assert "agentd_fleet_log_lines_lost_total 0.0" not in metrics
    assert "agentd_fleet_log_lines_lost_total" in metrics
    text = logs[1].read()
    assert (await gateway.create(kernel_id="k2")).status == 201
    assert "log.lines_lost" in text + await logs[1].until("log.lines_lost")
    for program in world.programs:
        process = program.process
        assert process is not None
        logs[1].end_reader()
        process.terminate()
        assert await asyncio.to_thread(process.wait, 20) == 0


async def test_reload_ends_the_warning_of_a_renewed_certificate(world: World) -> None:
    cert, key = certificate_that_ends(world.folder, 3)
    kept_in = f'cert = "{cert}"\nkey = "{key}"\n'
    gateway = world.gateway(f'[fleet]\nnodes = ["unix:{world.folder}/none.sock"]\n{kept_in}')
    await gateway.until({})
    await gateway.until_logged(f"{cert} expires at ")
    certificate_that_ends(world.folder, 300)
    gateway.process.send_signal(signal.SIGHUP)
    await gateway.until_logged("gateway.reloaded")
    assert gateway.log.count(f"{cert} expires at ") == 1


@pytest.mark.parametrize("name", PARTS)
async def test_gateway_fails_when_a_part_ends(folder: Path, name: str) -> None:
    config = folder / "fleet.toml"
    config.write_text(
        f'[fleet]\nnodes = ["unix:{folder}/none.sock"]\n'
        f'[gateway]\nsocket = "{folder}/gate.sock"\nstate-dir = "{folder}/gate"\n'
    )
    program = KILLED.format(name=PARTS[name], config=str(config))
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"agentd-fleet: background task {name} ended: returned" in done.stderr
