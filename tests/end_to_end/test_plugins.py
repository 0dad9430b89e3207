"""Plugins that misbehave in a real daemon: it is ready, others work, kernels run on."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentd.cli.agentctl.main import agentctl
from support.daemon import AGENTS, Daemon, gpus
from support.daemon_pool import Serving
from support.waiting import until

PACE = "[plugins]\nopen-timeout = 1.5\ncall-timeout = 1\nhealth-interval = 0.1\n"
GOOD = gpus(2, table="npu")


def config(extra: str = "") -> str:
    return AGENTS + PACE + GOOD + gpus(2) + extra


def plugin(node: dict[str, Any], name: str = "cuda") -> dict[str, Any]:
    return next(item for item in node["plugins"] if item["name"] == name)


async def eventually(daemon: Daemon, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for the node to be as it should."""
    async with asyncio.timeout(20):
        while not holds(node := await daemon.get("/v1/node")):
            await asyncio.sleep(0.02)
        return node


def status(daemon: Daemon) -> str:
    socket = str(daemon.folder / "agentd.sock")
    return CliRunner().invoke(agentctl, ["--socket", socket, "status"]).output


async def two_kernels(daemon: Daemon) -> list[dict[str, Any]]:
    await daemon.start(config())
    return [
        await daemon.running(kernel_id="k1", slots={"cuda.device": 1}),
        await daemon.running(kernel_id="k2", slots={"npu.device": 1}),
    ]


async def assert_the_rest_works(daemon: Daemon, before: list[dict[str, Any]]) -> None:
    after = [await daemon.get(f"/v1/kernels/{kernel['kernel_id']}") for kernel in before]
    assert [kernel["pid"] for kernel in after] == [kernel["pid"] for kernel in before]
    assert {kernel["state"] for kernel in after} == {"running"}
    other = await daemon.running("agent-2", slots={"npu.device": 1})
    assert other["allocation"]["npu"]["npu.device"] == {"npu1": "1"}
    assert (await daemon.device("cuda0"))["holders"] == [
        {"kernel_id": "k1", "amount": "1", "amounts": {"cuda.device": "1"}}
    ]


@pytest.mark.parametrize(
    ("extra", "state", "why"),
    [
        ('fault = "raise"\nfault-at = "open"\n', "pending", "the simulated driver fails at open"),
        ('fault = "crash"\nfault-at = "list"\n', "pending", "killed by SIGSEGV"),
        ('fault = "hang"\nfault-at = "open"\n', "pending", "not open within 1.5 s"),
        ('fault = "absent"\nfault-at = "open"\n', "absent", "the simulated bus has no such"),
        ('lie = "twice"\n', "failed", "duplicate id cuda0"),
    ],
    ids=["raises", "crashes", "hangs", "absent", "lies"],
)
async def test_a_plugin_that_fails_at_the_start_harms_only_itself(
    plain: Daemon, extra: str, state: str, why: str
) -> None:
    """One case for each kind; the host's own tests have them all."""
    before = await two_kernels(plain)
    await plain.restart(config(extra))
    told = plugin(await plain.get("/v1/node"))
    assert told["state"] == state
    assert why in told["reason"]
    assert " ".join(told["reason"].split()[:4]) in " ".join(status(plain).split())
    refused = await plain.create(slots={"cuda.device": 1})
    if state == "pending":
        assert (refused.status, refused.json["code"]) == (503, "PluginUnavailable")
        assert why in refused.json["detail"]
    else:
        assert (refused.status, refused.json["code"]) == (422, "UnsupportedResource")
        assert why in refused.json["plugins"]["cuda"]
    await assert_the_rest_works(plain, before)


def raising_until(driver: Path) -> str:
    return f'fault = "raise"\nfault-at = "open"\nfault-until = "{driver}"\n'


async def test_retry_finds_a_new_driver_at_once(plain: Daemon, tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    await plain.start(config(raising_until(driver)))
    assert (await plain.create(slots={"cuda.device": 1})).status == 503
    driver.touch()
    socket = str(plain.folder / "agentd.sock")
    tried = CliRunner().invoke(agentctl, ["--socket", socket, "plugins", "retry", "cuda"])
    assert tried.exit_code == 0, tried.output
    await plain.running(slots={"cuda.device": 1})
    unknown = CliRunner().invoke(agentctl, ["--socket", socket, "plugins", "retry", "tpu"])
    assert "UnknownPlugin" in unknown.output


async def test_new_driver_is_found_without_a_retry(
    serving_process: Serving, tmp_path: Path
) -> None:
    driver = tmp_path / "driver"
    plain = await serving_process(config(raising_until(driver)))
    driver.touch()
    await eventually(plain, lambda node: plugin(node)["state"] == "ready")
    await plain.running(slots={"cuda.device": 1})


@pytest.mark.parametrize(
    ("fault", "at", "why"),
    [
        ("raise", "list", "the simulated driver fails at list"),
        ("hang", "list", "listing: no answer within 1 s"),
        ("exit", "list", "exited with status 3"),
        ("crash", "measure", "killed by SIGSEGV"),
    ],
)
async def test_failed_plugin_recovers_while_the_daemon_runs(
    plain: Daemon, fault: str, at: str, why: str
) -> None:
    extra = f'fault = "{fault}"\nfault-at = "{at}"\nfault-after = 10\n'
    before = await two_kernels(plain)
    await plain.restart(config(extra))
    node = await eventually(plain, lambda node: plugin(node)["state"] == "failed")
    assert why in plugin(node)["reason"]
    assert plugin(node)["slots"] == ["cuda.device"]
    refused = await plain.create(slots={"cuda.device": 1})
    assert (refused.status, refused.json["code"]) == (503, "PluginUnavailable")
    assert why in refused.json["detail"]
    assert refused.headers["Retry-After"]
    await assert_the_rest_works(plain, before)
    await eventually(plain, lambda node: plugin(node)["state"] == "ready")
    assert (await plain.create(slots={"cuda.device": 1})).status == 201


@pytest.mark.parametrize(("fault", "why"), [("raise", "fails at edits"), ("hang", "no answer")])
async def test_edits_that_fail_refuse_the_one_create_that_needs_them(
    serving_process: Serving, fault: str, why: str
) -> None:
    plain = await serving_process(config(f'fault = "{fault}"\nfault-at = "edits"\n'))
    slow = asyncio.create_task(plain.create(slots={"cuda.device": 1}))
    assert (await plain.create(slots={"npu.device": 1})).status == 201
    refused = await slow
    assert (refused.status, refused.json["code"]) == (503, "PluginUnavailable")
    assert why in refused.json["detail"]
    assert await plain.free("cuda.device") == "2"
    assert len(await plain.get("/v1/kernels")) == 1


async def test_a_flood_of_output_is_bounded_and_named(plain: Daemon) -> None:
    await plain.start(config('fault = "flood"\nfault-at = "open"\n'))
    assert plugin(await plain.get("/v1/node"))["state"] == "ready"
    assert (await plain.create(slots={"cuda.device": 1})).status == 201
    lines = [line for line in plain.log.splitlines() if "has much to say" in line]
    assert 10 < len(lines) <= 100
    assert all('"plugin": "cuda"' in line for line in lines)


async def test_a_device_leaves_and_comes_back_with_its_health(
    serving_process: Serving, tmp_path: Path
) -> None:
    script = tmp_path / "health"
    plain = await serving_process(config(f'health-file = "{script}"\n'))
    kernel = await plain.running(kernel_id="k1", slots={"cuda.device": 1})
    generation = (await plain.get("/v1/node"))["generation"]

    async def said(text: str) -> dict[str, Any]:
        nonlocal generation
        write(script, text)
        node = await eventually(plain, lambda node: node["generation"] > generation)
        generation = node["generation"]
        return await plain.device("cuda0")

    sick = await said("cuda0 unhealthy Xid 79: fell off the bus\ncuda1 unknown\n")
    assert (sick["state"], sick["reason"]) == ("unhealthy", "Xid 79: fell off the bus")
    assert (await plain.get("/v1/kernels/k1"))["degraded"] == [
        "cuda/cuda0: unhealthy: Xid 79: fell off the bus"
    ]
    assert await plain.free("cuda.device") == "1"
    refused = await plain.create(slots={"cuda.device": 2})
    assert "unhealthy: Xid 79" in refused.json["explain"][0]["reason"]
    gone = await said("cuda0 gone\n")
    assert (gone["state"], gone["holders"][0]["kernel_id"]) == ("gone", "k1")
    back = await said("")
    assert back["state"] == "ok"
    after = await plain.get("/v1/kernels/k1")
    assert (after["degraded"], after["pid"]) == ([], kernel["pid"])
    assert await plain.free("cuda.device") == "1"


def write(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


async def test_drain_survives_restarts_and_health_changes(plain: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "health"
    await plain.start(config(f'health-file = "{script}"\n'))
    assert (await plain.call("POST", "/v1/devices/cuda/cuda1/drain")).json["state"] == "drained"
    generation = (await plain.get("/v1/node"))["generation"]
    write(script, "cuda1 unhealthy hot\n")
    await eventually(plain, lambda node: node["generation"] > generation)
    assert (await plain.device("cuda1"))["state"] == "unhealthy"
    write(script, "")
    await eventually(plain, lambda node: node["generation"] > generation + 1)
    assert (await plain.device("cuda1"))["state"] == "drained"
    await plain.restart()
    assert (await plain.device("cuda1"))["state"] == "drained"
    assert await plain.free("cuda.device") == "1"


async def test_no_plugin_process_outlives_the_daemon(plain: Daemon) -> None:
    await plain.start(config('fault = "hang"\nfault-at = "open"\n'))
    assert plain.process is not None
    children = Path(f"/proc/{plain.process.pid}/task/{plain.process.pid}/children")
    pids = [int(pid) for pid in children.read_text().split()]
    assert len(pids) == 2
    await plain.stop(9)
    await until(lambda: not any(is_alive(pid) for pid in pids), within_s=10)


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
