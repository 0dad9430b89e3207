"""A condition that begins while agentd runs is the same one on every surface."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from click.testing import CliRunner, Result

from agentd.cli.agentctl.main import agentctl
from end_to_end.test_events import listening, until
from support.daemon import AGENTS, Daemon

PLUGINS = (
    AGENTS
    + """
[plugins]
health-interval = 0.1
[plugins.cuda]
plugin = "sim"
count = {count}
health-file = "{health}"
"""
)
REASON = "cuda3 is unhealthy: GPU is lost"
DEVICE = "device/cuda/cuda3"


def ask(daemon: Daemon, *words: str) -> Result:
    socket = str(daemon.folder / "agentd.sock")
    return CliRunner().invoke(agentctl, ["--socket", socket, *words])


async def start(daemon: Daemon, count: int = 4) -> None:
    (daemon.folder / "health").write_text("")
    text = PLUGINS.replace("{health}", str(daemon.folder / "health"))
    await daemon.start(text.replace("{count}", str(count)))


async def until_listed(daemon: Daemon, holds: Callable[[list[Any]], bool]) -> list[dict[str, Any]]:
    async with asyncio.timeout(20):
        while not holds(found := (await daemon.get("/v1/node"))["conditions"]):
            await asyncio.sleep(0.02)
        return found


async def shown_everywhere(daemon: Daemon, *expected: tuple[str, str]) -> None:
    """Compare all surfaces with these subjects and reasons."""
    node = await daemon.get("/v1/node")
    assert [(c["about"], c["reason"]) for c in node["conditions"]] == [*expected]
    assert node["warnings"] == [reason for _, reason in expected]
    metrics = (await daemon.call("GET", "/metrics")).content.decode()
    lines = {f'agentd_condition{{about="{about}"}} 1.0' for about, _ in expected}
    assert {line for line in metrics.splitlines() if line.startswith("agentd_condition{")} == lines
    assert f"agentd_warnings {len(expected)}.0" in metrics
    status = await asyncio.to_thread(ask, daemon, "status")
    doctor = await asyncio.to_thread(ask, daemon, "doctor")
    assert [line for line in status.output.splitlines() if "warning" in line] == [
        f"warning: {reason}" for _, reason in expected
    ]
    assert all(reason in doctor.output for _, reason in expected)
    assert doctor.exit_code == bool(expected)


async def test_device_that_fails_is_on_every_surface(plain: Daemon) -> None:
    await start(plain)
    await shown_everywhere(plain)
    (plain.folder / "health").write_text("cuda3 unhealthy GPU is lost\n")
    (began,) = await until_listed(plain, bool)
    assert began == {"about": DEVICE, "reason": REASON, "remedy": "", "since": began["since"]}
    await shown_everywhere(plain, (DEVICE, REASON))
    await plain.until_logged("condition.began")
    await plain.restart()
    await shown_everywhere(plain, (DEVICE, REASON))
    await plain.until_logged("condition.began", 2)
    (plain.folder / "health").write_text("")
    await until_listed(plain, lambda found: not found)
    await shown_everywhere(plain)
    await plain.until_logged("condition.ended")
    changes = [json.loads(line) for line in plain.log.splitlines() if '"condition.' in line]
    assert [(change["level"], change["event"], change["reason"]) for change in changes] == [
        ("warning", "condition.began", REASON),
        ("warning", "condition.began", REASON),
        ("info", "condition.ended", REASON),
    ]


async def test_events_show_begin_and_end_of_a_condition(plain: Daemon) -> None:
    await start(plain)
    async with listening(plain) as frames:
        (plain.folder / "health").write_text("cuda3 unhealthy GPU is lost\n")
        *_, began = await until(frames, event="condition")
        assert (began["data"]["about"], began["data"]["reason"]) == (DEVICE, REASON)
        (plain.folder / "health").write_text("")
        *_, ended = await until(frames, event="condition-removed")
        assert ended["data"] == {"about": DEVICE, "reason": REASON}


async def test_many_missing_devices_are_few_lines_and_all_return(plain: Daemon) -> None:
    """https://github.com/NVIDIA/NVSentinel/issues/1299."""
    subjects = {f"device/cuda/cuda{n}" for n in range(300)}
    await start(plain, 300)
    async with listening(plain) as frames:
        (plain.folder / "health").write_text("".join(f"cuda{n} gone\n" for n in range(300)))
        began = [await until(frames, event="condition") for _ in subjects]
        assert {frames[-1]["data"]["about"] for frames in began} == subjects
        for command in ("status", "doctor"):
            lines = (await asyncio.to_thread(ask, plain, command)).output.splitlines()
            assert sum("is gone" in line for line in lines) == 8
            assert sum("292 more" in line for line in lines) == 1
        (plain.folder / "health").write_text("")
        ended = [await until(frames, event="condition-removed") for _ in subjects]
        assert {frames[-1]["data"]["about"] for frames in ended} == subjects
    await shown_everywhere(plain)


async def test_condition_of_a_replaced_card_ends_when_it_is_forgotten(plain: Daemon) -> None:
    """https://github.com/NVIDIA/NVSentinel/issues/1585."""
    card = (
        '[plugins.cuda]\nplugin = "sim"\n[[plugins.cuda.devices]]\nid = "cuda0"\nstable-id = "{}"\n'
    )
    await plain.start(AGENTS + card.format("GPU-old"))
    await plain.stop()
    await plain.start(AGENTS + card.format("GPU-new"))
    found = await until_listed(plain, bool)
    assert [(c["about"], c["remedy"]) for c in found if "gone" in c["reason"]] == [
        ("device/cuda/cuda0", "if it does not return: agentctl forget cuda0")
    ]
    result = await asyncio.to_thread(ask, plain, "forget", "cuda0")
    assert result.exit_code == 0, result.output
    await until_listed(plain, lambda found: not any("gone" in c["reason"] for c in found))
