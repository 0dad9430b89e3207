"""Operators let go of a plugin's devices, and take them again, while kernels run."""

import json
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentd.cli.agentctl.main import agentctl
from support.daemon import AGENTS, Daemon, gpus
from support.waiting import until

PACE = "[plugins]\ncall-timeout = 1\nhealth-interval = 0.1\n"
SETTINGS = '\nrequired = true\nfiles = ["/dev/null"]\n'
CONFIG = AGENTS + PACE + gpus(2, table="npu") + gpus(2).replace("\n", SETTINGS, 1)


def run(daemon: Daemon, *command: str, exit_code: int = 0) -> str:
    socket = str(daemon.folder / "agentd.sock")
    ran = CliRunner().invoke(agentctl, ["--socket", socket, *command])
    assert ran.exit_code == exit_code, ran.output
    return ran.output


async def assert_stopped(daemon: Daemon) -> None:
    """The devices keep ids, holders and drains, offer nothing, and their slots are known."""
    first, second = await daemon.device("cuda0"), await daemon.device("cuda1")
    assert (first["state"], first["free"], second["free"]) == ("withheld", "0", "0")
    assert "stopped by " in first["reason"]
    assert [holder["kernel_id"] for holder in first["holders"]] == ["k1"]
    assert (first["files"], second["files"]) == (["/dev/null"], ["/dev/null"])
    refused = await daemon.create(slots={"cuda.device": 1})
    assert (refused.status, refused.json["code"]) == (503, "PluginUnavailable")
    node = await daemon.get("/v1/node")
    (plugin,) = [plugin for plugin in node["plugins"] if plugin["name"] == "cuda"]
    assert (plugin["state"], plugin["slots"]) == ("stopped", ["cuda.device"])
    remedy = "to start it: agentctl plugins start cuda"
    assert refused.json["detail"] == f"plugin cuda is {plugin['reason']}"
    checks = json.loads(run(daemon, "doctor", "-o", "json", exit_code=1))
    (check,) = [check for check in checks if check["check"] == "plugins"]
    assert check["findings"] == [f"plugin cuda is {plugin['reason']} ({remedy})"]
    assert (await daemon.call("POST", "/v1/plugins/cuda/retry")).status == 409


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_stop_of_a_plugin_survives_a_restart_of_agentd(plain: Daemon, number: int) -> None:
    await plain.start(CONFIG)
    before = await plain.running(kernel_id="k1", slots={"cuda.device": 1})
    run(plain, "drain", "cuda1")
    stopped = await plain.call("POST", "/v1/plugins/cuda/stop")
    assert (stopped.status, stopped.json["state"]) == (200, "stopped")
    assert stopped.json["reason"].startswith("stopped by ")
    assert (await plain.call("POST", "/v1/plugins/cuda/stop")).json == stopped.json
    await assert_stopped(plain)
    await plain.stop(number)
    await plain.start(CONFIG)
    await assert_stopped(plain)
    assert (await plain.get("/v1/kernels/k1"))["pid"] == before["pid"]
    await plain.running(slots={"npu.device": 1})
    run(plain, "plugins", "start", "cuda")
    second = await plain.device("cuda1")
    assert (second["state"], (await plain.device("cuda0"))["state"]) == ("drained", "ok")
    run(plain, "undrain", "cuda1")
    await plain.running(slots={"cuda.device": 1})
    assert (await plain.call("POST", "/v1/plugins/tpu/stop")).json["code"] == "UnknownPlugin"


async def test_agent_is_renamed_while_its_plugin_is_stopped(plain: Daemon) -> None:
    dealt = '[resource]\nallocation-mode = "auto-split"\nauto-split-order = "plugin"\n'
    dealt += AGENTS + PACE + gpus(4) + 'links = [["cuda0", "cuda2"], ["cuda1", "cuda3"]]\n'
    renamed = dealt.replace("agent-2", "agent-3")
    await plain.start(dealt)
    run(plain, "plugins", "stop", "cuda")
    await plain.restart(renamed)
    assert (await plain.device("cuda1"))["agents"] == []
    run(plain, "plugins", "start", "cuda")
    assert (await plain.device("cuda0"))["agents"] == ["agent-1"]
    for device in ("cuda1", "cuda3"):
        assert (await plain.device(device))["agents"] == ["agent-3"]


async def test_clear_ends_a_trouble_that_waits_for_an_operator(
    plain: Daemon, tmp_path: Path
) -> None:
    health = tmp_path / "health"
    health.write_text("cuda0 latched Xid 13\ncuda1 unhealthy Xid 79\n")
    await plain.start(AGENTS + PACE + gpus(2) + f'health-file = "{health}"\n')
    first = await plain.device("cuda0")
    assert (first["state"], first["free"]) == ("unhealthy", "0")
    assert first["reason"] == "Xid 13; waits for agentctl clear"
    health.write_text("cuda1 unhealthy Xid 79\n")  # as after a restart of the plugin
    run(plain, "plugins", "stop", "cuda")
    await plain.restart()
    run(plain, "plugins", "start", "cuda")
    again = await plain.device("cuda0")
    assert (again["state"], again["reason"]) == ("unhealthy", first["reason"])
    assert [c["remedy"] for c in (await plain.get("/v1/node"))["conditions"]] == [
        "after a check: agentctl clear cuda0",
        "",
    ]
    run(plain, "clear", "cuda0")
    assert (await plain.device("cuda0"))["state"] == "ok"
    for name in ("cuda0", "cuda1"):
        refused = await plain.call("POST", f"/v1/devices/cuda/{name}/clear")
        assert (refused.status, refused.json["code"]) == (409, "Conflict")
    health.write_text("cuda0 latched Xid 43\n")

    async def state() -> str:
        return (await plain.device("cuda0"))["state"]

    await until(state, "unhealthy")
    cleared = await plain.call("POST", "/v1/devices/cuda/cuda0/clear")
    assert (cleared.status, cleared.json["state"]) == (200, "ok")
    assert (await plain.call("POST", "/v1/devices/cuda/cuda9/clear")).status == 404


async def test_excluded_devices_are_listed_and_belong_to_nobody(plain: Daemon) -> None:
    split = '[resource]\nallocation-mode = "auto-split"\n' + AGENTS + PACE
    exclude = 'exclude = ["SIM-cuda-cuda0", "cuda7"]\n'
    await plain.start(split + gpus(3) + exclude)
    first = await plain.device("cuda0")
    assert (first["state"], first["reason"]) == ("withheld", "excluded in [plugins.cuda]")
    assert (first["agents"], first["free"]) == ([], "0")
    agents = await plain.get("/v1/agents")
    assert [agent["devices"]["cuda"] for agent in agents] == [["cuda1"], ["cuda2"]]
    assert [w for w in await plain.warnings() if "cuda" in w] == [
        "cuda7 in exclude of [plugins.cuda] matches no device of this node"
    ]
    await plain.restart(split + gpus(3))
    assert (await plain.device("cuda0"))["agents"] == ["agent-1"]


async def test_forgotten_device_that_is_configured_is_a_warning(
    plain: Daemon, tmp_path: Path
) -> None:
    health = tmp_path / "health"
    parts = [
        f'[[agents]]\nid = "agent-{n}"\n[agents.resource]\ncpu = 1\nmem = "300m"\n'
        f'devices = {{ cuda = ["cuda{n}"] }}\n'
        for n in (1, 2)
    ]
    config = f'[resource]\nallocation-mode = "manual"\n{"".join(parts)}{PACE}'
    config += gpus(3) + f'health-file = "{health}"\n'
    await plain.start(config)
    health.write_text("cuda1 gone\n")

    async def state() -> str:
        return (await plain.device("cuda1"))["state"]

    await until(state, "gone")
    missing = "cuda1 is missing, and the configuration gives it to agent-1"
    assert missing in run(plain, "forget", "cuda1")
    await plain.restart(config)
    assert missing in await plain.warnings()
    await plain.running("agent-2", slots={"cuda.device": 1})
    health.unlink()
    await plain.restart(config)
    assert (await plain.device("cuda1"))["agents"] == ["agent-1"]
    assert missing not in await plain.warnings()


async def test_failed_plugin_offers_nothing_and_says_why(plain: Daemon) -> None:
    failing = 'fault = "raise"\nfault-at = "list"\nfault-after = 3\n'
    await plain.start(AGENTS + PACE + gpus(2) + failing)

    async def shown() -> tuple[str, str]:
        device = await plain.device("cuda0")
        return device["state"], device["free"]

    await until(shown, ("withheld", "0"))
    assert "the simulated driver fails" in (await plain.device("cuda0"))["reason"]
