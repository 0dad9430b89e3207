"""Reloads and background tasks of a running daemon: a failure is seen, and ends nothing else."""

import asyncio
import os
import ssl

import pytest

from agentd.client import AsyncClient
from agentd.errors import Forbidden
from agentd.program.background import NOT_VITAL
from end_to_end.test_tokens import Tokens, tokens
from support.certificates import certificate
from support.daemon import Daemon
from support.fork_server import run

__all__ = ["tokens"]

WORK = {
    "log": "agentd.daemon.lifecycle:Daemon._report_lost_lines",
    "claims": "agentd.services.claims.claim_ends:ClaimEnds.run",
    "cores": "agentd.services.lost_cores:LostCores.run",
    "missing": "agentd.daemon.reload:Reload.run",
    "reconciler": "agentd.services.kernels.reconciler:ReconcilerLoops.run",
    "reload": "agentd.daemon.lifecycle:Daemon._reload_on_hangup",
    "retention": "agentd.services.kernels.retention:Retention.run",
    "status": "agentd.daemon.lifecycle:Daemon._update_status",
    "unclaimed": "agentd.services.unclaimed:UnclaimedProcesses.run",
}
"""The work of each background task."""
KILLED = """
import asyncio, importlib, pathlib, sys
name, trigger, *arguments = {name!r}, {trigger!r}, *sys.argv[1:]
module, _, path = name.partition(":")
owner, method = path.split(".")
async def dies(*_):
    while not pathlib.Path(trigger).exists():
        await asyncio.sleep(0.01)
    raise RuntimeError("killed")
setattr(getattr(importlib.import_module(module), owner), method, dies)
sys.argv = ["agentd", *arguments]
from agentd.cli.agentd.main import agentd
agentd()
"""


async def test_a_reload_that_cannot_work_is_not_the_last(plain: Daemon) -> None:
    await plain.start()
    good = plain.config_file.read_text()
    fifo = plain.folder / "fifo"
    os.mkfifo(fifo)
    plain.config_file.write_text(f'{good}\n[rpc]\ntls-cert = "/tmp/\\u0000x"\n')
    plain.reload()
    await plain.until_logged("daemon.reload_refused")
    plain.config_file.unlink()
    plain.config_file.symlink_to(fifo)
    plain.reload()
    await plain.until_logged("is a FIFO, expected a regular file")
    plain.config_file.unlink()
    plain.config_file.write_text(good)
    plain.reload()
    await plain.until_logged("daemon.reloaded")
    assert (await plain.get("/v1/node"))["warnings"] == []


async def test_reload_by_rpc_is_all_or_nothing_and_for_admins(tokens: Tokens) -> None:
    daemon = tokens.daemon
    tokens.configure(tokens.entry("team", "agent", "team-a"), tokens.entry("boss", "admin"))
    await daemon.start()
    good = daemon.config_file.read_text()
    client = AsyncClient(url=f"http://127.0.0.1:{tokens.port}", token=tokens.secrets["team"])
    async with client:
        with pytest.raises(Forbidden):
            await client.reload()
    done = await daemon.call("POST", "/v1/reload")
    assert (done.status, done.json) == (200, {"needs_restart": []})
    daemon.config_file.write_text(f'{good}\n[nosuch]\nx = 1\n[metrics]\nper-kernel = "x"\n')
    refused = await daemon.call("POST", "/v1/reload")
    content = refused.json
    assert (refused.status, content["code"]) == (422, "ConfigRefused")
    assert [error["where"] for error in content["errors"]] == ["metrics.per-kernel", "nosuch"]
    command = ("reload", "--config", str(daemon.config_file))
    assert run("agentd", *command).returncode == 78
    daemon.config_file.write_text(f"{good}\n[metrics]\nper-kernel = false\n")
    assert run("agentd", *command).stdout.splitlines() == [
        "reloaded",
        "metrics.per-kernel changed: restart agentd to apply it",
    ]


async def test_a_fifo_as_configuration_or_state_holds_up_no_start(plain: Daemon) -> None:
    plain.configure()
    os.mkfifo(plain.folder / "fifo")
    refused = plain.spawn("--config", str(plain.folder / "fifo"))
    assert await asyncio.to_thread(refused.wait, 30) == 78
    assert "is a FIFO, expected a regular file" in plain.log
    state = plain.folder / "state"
    state.mkdir(mode=0o711)
    os.mkfifo(state / "devices.json")
    await plain.start()
    (warning,) = (await plain.get("/v1/node"))["warnings"]
    assert warning == f"{state}/devices.json is a FIFO, expected a regular file"


@pytest.mark.parametrize("name", WORK)
async def test_a_background_task_that_ends_is_seen(plain: Daemon, name: str) -> None:
    trigger = plain.folder / "trigger"
    plain.program = ("-c", KILLED.format(name=WORK[name], trigger=str(trigger)))
    if name == "reconciler":  # the start waits for its first list
        trigger.touch()
        plain.configure()
        process = plain.spawn()
        assert await asyncio.to_thread(process.wait, 40) == 1
    else:
        await plain.start()
        trigger.touch()
    await plain.until_logged("task.ended")
    reason = f"background task {name} ended: RuntimeError: killed"
    if name in NOT_VITAL:
        assert (await plain.get("/v1/node"))["warnings"] == [f"{reason} (restart agentd)"]
        return
    if plain.process is not None:
        assert await plain.ended() == 1
    await plain.until_logged(f"agentd: {reason}")
    plain._program = None


@pytest.mark.needs("openssl")
async def test_new_connections_are_shown_the_renewed_certificate(tokens: Tokens) -> None:
    folder = tokens.daemon.folder
    cert, key = certificate(folder)
    files = f'tls-cert = "{cert}"\ntls-key = "{key}"\n'
    tokens.configure(files, tokens.entry("team", "agent", "team-a"))
    await tokens.daemon.start()

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", tokens.port))

    assert await asyncio.to_thread(shown) == cert.read_text()
    before = cert.read_text()
    certificate(folder)
    tokens.daemon.reload()
    await tokens.daemon.until_logged("daemon.reloaded")
    assert await asyncio.to_thread(shown) == cert.read_text() != before


async def test_weak_token_is_one_warning(tokens: Tokens) -> None:
    tokens.secrets["team"] = "x"
    file = tokens.daemon.folder / "token-team"
    file.write_text("x")
    tokens.configure(tokens.entry("team", "agent", "team-a"))
    await tokens.daemon.start()
    expected = f"{file} holds a token of 1 characters, expected 16 or more"
    await tokens.daemon.until_logged(expected)
    for path in ("/v1/node", "/v1/node?check=true"):
        warnings = (await tokens.daemon.get(path))["warnings"]
        assert sum(warning.startswith(expected) for warning in warnings) == 1, warnings
    checked = run("agentd", "check-config", "--config", str(tokens.daemon.config_file))
    assert (checked.returncode, f"warning: {expected}" in checked.stderr) == (0, True)
