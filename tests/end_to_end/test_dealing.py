"""Plugins that deal their devices to the agents of a daemon."""

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner

from agentd.cli.agentd.main import agentd
from support.daemon import AGENTS, Daemon, gpus

ORDER = '[resource]\nallocation-mode = "auto-split"\nauto-split-order = "plugin"\n'
PACE = '[plugins]\nallow = ["sim"]\nhealth-interval = 0.1\n'
CROSSED = 'links = [["cuda0", "cuda3"]]\n'


def config(extra: str, agents: str = AGENTS) -> str:
    return agents + ORDER + PACE + gpus(4) + extra


async def owned(daemon: Daemon) -> list[list[str]]:
    return [agent["devices"]["cuda"] for agent in await daemon.get("/v1/agents")]


async def test_linked_devices_stay_with_one_agent_whatever_is_lost(
    plain: Daemon, tmp_path: Path
) -> None:
    health = tmp_path / "health"
    named = f'health-file = "{health}"\n'
    await plain.start(config(CROSSED + named))
    assert await owned(plain) == [["cuda0", "cuda3"], ["cuda1", "cuda2"]]
    await plain.running("agent-2", kernel_id="k1", slots={"cuda.device": 2})
    # links are others, a device is lost
    health.write_text("cuda3 gone\n")
    await plain.restart(config('links = [["cuda0", "cuda1"]]\n' + named))
    assert await owned(plain) == [["cuda0", "cuda3"], ["cuda1", "cuda2"]]
    assert (await plain.device("cuda3"))["state"] == "gone"
    # the agents are others, so the plugin is asked again
    agents = AGENTS.replace("agent-1", "agent-3")
    await plain.restart(config(named, agents))
    assert await owned(plain) == [["cuda0", "cuda1"], ["cuda2", "cuda3"]]


async def test_excluded_device_is_not_dealt(plain: Daemon) -> None:
    await plain.start(config('exclude = ["cuda1"]\n' + CROSSED))
    assert await owned(plain) == [["cuda0", "cuda3"], ["cuda2"]]
    assert (await plain.device("cuda1"))["state"] == "withheld"
    await plain.restart(config(CROSSED))
    assert await owned(plain) == [["cuda0", "cuda3"], ["cuda1", "cuda2"]]


async def test_plan_asks_the_plugin_and_uses_what_is_kept(plain: Daemon) -> None:
    plain.configure(config(CROSSED))
    crossed = [["cuda0", "cuda3"], ["cuda1", "cuda2"]]
    assert await planned(plain) == crossed
    await plain.start()
    plain.configure(config(""))
    assert await planned(plain) == crossed


async def planned(daemon: Daemon) -> list[list[str]]:
    arguments = ["plan", "--json", "--config", str(daemon.config_file)]
    done = await asyncio.to_thread(CliRunner().invoke, agentd, arguments)
    assert done.exit_code == 0, done.output
    return [agent["devices"]["cuda"] for agent in json.loads(done.stdout)["agents"].values()]


async def test_dealing_that_fails_is_tried_again(plain: Daemon, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    fault = f'fault = "raise"\nfault-at = "partition"\nfault-until = "{mended}"\n'
    await plain.start(config(fault + CROSSED))
    refused = await plain.create(slots={"cuda.device": 1})
    assert (refused.status, refused.json["code"]) == (503, "PluginUnavailable")
    assert (
        "partition: RuntimeError: the simulated driver fails at partition"
        in (refused.json["detail"])
    )
    mended.touch()
    retried = await plain.call("POST", "/v1/plugins/cuda/retry")
    assert retried.status == 200, retried.content
    assert await owned(plain) == [["cuda0", "cuda3"], ["cuda1", "cuda2"]]
