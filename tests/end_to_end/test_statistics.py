"""Reported usage matches a load of known size, on every runtime."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.checked_node import SOAK_S
from support.daemon import AGENTS, Daemon, gpus
from support.needs import require
from support.waiting import until


@pytest.fixture(autouse=True)
def counted(daemon: Daemon) -> None:
    if daemon.runtime == "process":
        require("cgroups")
    daemon.deadlines = {"agentd.services.statistics.MAX_AGE_S": 0.0}


async def stats(daemon: Daemon, kernel_id: str) -> dict[str, Any]:
    """Return figures that are not the last ones again."""
    if SOAK_S:
        await asyncio.sleep(1.1)
    return await daemon.get(f"/v1/kernels/{kernel_id}/stats")


async def metrics(daemon: Daemon) -> dict[tuple[str, ...], float]:
    text = (await daemon.call("GET", "/metrics")).content.decode()
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_usage_survives_a_restart_with_unknown_as_null(daemon) -> None:
    await daemon.start(AGENTS + gpus(1))
    script = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo done; sleep 1000"
    await daemon.running(kernel_id="k1", command=["sh", "-c", script])
    await until(
        lambda: daemon.call("GET", "/v1/kernels/k1/logs"),
        lambda value: b"done" in value.content,
        within_s=60,
    )
    before = await stats(daemon, "k1")
    await daemon.restart()
    after = await daemon.get("/v1/kernels/k1/stats")
    assert after["cpu_seconds"] >= before["cpu_seconds"] > 0
    await daemon.call("POST", "/v1/kernels/k1/stop", {"timeout": 0})
    ended = await stats(daemon, "k1")
    assert ended["devices"] == []
    if daemon.runtime == "docker":
        assert ended["cpu_seconds"] is None, "its cgroup went with it"
    else:
        assert ended["cpu_seconds"] >= after["cpu_seconds"]
        assert (ended["memory_bytes"], ended["processes"]) == (None, None)
        await daemon.restart()
        again = await daemon.get("/v1/kernels/k1/stats")
        assert {**again, "at": ""} == {**ended, "at": ""}


async def test_metrics_answer_what_operators_ask(daemon) -> None:
    await daemon.start(AGENTS + gpus(1))
    await daemon.running(kernel_id="k1", slots={"cpu": 1, "cuda.device": 1})
    refused = await daemon.create(kernel_id="k2", slots={"cuda.device": 2})
    assert refused.status == 409
    assert (await daemon.create(kernel_id="k3", slots={"what.ever": 1})).status == 422
    missing = await daemon.create(kernel_id="k4", command=["no-such-program"])
    assert missing.status == 422
    assert (await daemon.create("nobody", kernel_id="k5")).status == 404
    shown = await metrics(daemon)
    mine = ("agent_id=agent-1", "kernel_id=k1")
    assert shown["agentd_kernel_cpu_seconds_total", *mine] >= 0
    assert shown["agentd_kernel_processes", *mine] == 1
    held = ("agent_id=agent-1", "device_name=cuda", "id=cuda0", "kernel_id=k1")
    assert shown["agentd_kernel_device_share", *held] == 1
    device = ("device_name=cuda", "id=cuda0", "slot=cuda.device")
    assert shown["agentd_device_free", *device] == 0
    assert shown["agentd_device_allocated", *device] == 1
    assert shown["agentd_device_agent", "agent=agent-1", *device[:2]] == 1
    for result, count in (("created", 1), ("refused", 2), ("failed", 1)):
        assert shown["agentd_creates_total", "agent=agent-1", f"result={result}"] == count
    assert shown["agentd_refusals_total", "code=InsufficientResource", "slot=cuda.device"] == 1
    assert shown["agentd_refusals_total", "code=UnsupportedResource", "slot="] == 1
    assert shown["agentd_create_seconds_count", "share=whole"] == 1
    whole, own = (shown["agentd_create_seconds_sum", f"share={s}"] for s in ("whole", "own"))
    assert 0 < own < whole
    assert shown["agentd_kernels", "agent=agent-1", "state=running"] == 1
    assert shown["agentd_slot_allocated", "agent=agent-1", "slot=cuda.device"] == 1
    assert shown["agentd_slot_free", "agent=agent-2", "slot=cuda.device"] == 0
    assert shown["agentd_plugin_ready", "plugin=cuda"] == 1
    assert shown["agentd_plugin_restarts_total", "plugin=cuda"] == 0
    assert 0 <= shown["agentd_plugin_last_list_seconds", "plugin=cuda"] < 60
    assert shown["agentd_runtime_available", f"runtime={daemon.runtime}"] == 1
    assert shown["agentd_device_state", *device[:2], "state=ok"] == 1
    assert not [name for name, *labels in shown if "agent=nobody" in labels]
    await daemon.restart(AGENTS + gpus(1) + "[metrics]\nper-kernel = false\n")
    assert not [name for name, *_ in await metrics(daemon) if name.startswith("agentd_kernel_")]
