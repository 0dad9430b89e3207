"""A real Prometheus scrapes a node, is asked what operators ask, and loads the alert rules."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from end_to_end.prometheus import Prometheus, documented, free_port, panels, promtool, rules_of
from support.daemon import AGENTS, BASE, Daemon, gpus

pytestmark = pytest.mark.needs("prometheus")


@pytest.fixture
async def scraped(plain: Daemon, folder: Path) -> AsyncIterator[tuple[Daemon, Prometheus]]:
    (folder / "token").write_text("a-token-for-prometheus\n")
    (folder / "token").chmod(0o600)
    port = free_port()
    listen = f'[[rpc.tokens]]\nname = "prometheus"\nfile = "{folder}/token"\nrole = "read"\n'
    rpc = f'[rpc]\nlisten = "127.0.0.1:{port}"\n'
    plain.configure(AGENTS + gpus(2) + listen, BASE.replace("[rpc]\n", rpc))
    await plain.start()
    made = Prometheus(folder, "agentd", port, folder / "token")
    yield plain, made
    await made.stop()


async def test_page_answers_operators_questions(scraped: tuple[Daemon, Prometheus]) -> None:
    daemon, prometheus = scraped
    busy = ["sh", "-c", "while :; do :; done"]
    await daemon.running(kernel_id="k1", command=busy, slots={"cpu": 1, "cuda.device": 1})
    assert (await daemon.create(kernel_id="k2", slots={"cuda.device": 9})).status == 409
    rate = 'rate(agentd_kernel_cpu_seconds_total{kernel_id="k1"}[5s])'
    (used,) = await prometheus.until(f"{rate} > 0.05")
    assert float(used["value"][1]) <= 1.5
    held = await prometheus.until("agentd_kernel_device_share")
    assert {(row["metric"]["kernel_id"], row["metric"]["id"]) for row in held} == {("k1", "cuda0")}
    part = "agentd_kernel_memory_bytes / agentd_kernel_memory_limit_bytes"
    (near,) = await prometheus.until(part)
    assert 0 < float(near["value"][1]) < 1
    (free,) = await prometheus.query('sum by (slot) (agentd_device_free{device_name="cuda"})')
    assert float(free["value"][1]) == 1
    (why,) = await prometheus.until('agentd_refusals_total{code="InsufficientResource"} > 0')
    assert why["metric"]["slot"] == "cuda.device"
    buckets = await prometheus.until('agentd_create_seconds_bucket{share="whole",le="+Inf"}')
    assert float(buckets[0]["value"][1]) == 1


async def test_every_documented_query_and_alert_is_valid(scraped) -> None:
    daemon, prometheus = scraped
    await daemon.running(kernel_id="k1", slots={"cuda.device": 1})
    await prometheus.until("agentd_kernels")
    queries = documented("operations/monitor.md")
    assert len(queries) >= 7
    for query in [*queries, *panels("agentd")]:
        assert isinstance(await prometheus.query(query), list)
    rules = await prometheus.alerts()
    assert len(rules) >= 7
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}


async def test_known_counters_begin_at_zero(scraped: tuple[Daemon, Prometheus]) -> None:
    daemon, prometheus = scraped
    await prometheus.until('agentd_refusals_total{code="InsufficientResource"} == 0')
    await prometheus.until('agentd_creates_total{agent="agent-1", result="refused"} == 0')
    assert (await daemon.create(slots={"cuda.device": 9})).status == 409
    for first in (
        'agentd_refusals_total{code="InsufficientResource", slot="cuda.device"}',
        'agentd_creates_total{agent="agent-1", result="refused"}',
    ):
        await prometheus.until(f"increase({first}[1m]) > 0")


async def test_absent_hardware_raises_no_alert(scraped: tuple[Daemon, Prometheus]) -> None:
    daemon, prometheus = scraped
    config = daemon.config_file.read_text()
    for table, fault in (("tpu", "absent"), ("npu", "raise")):
        config += f'{gpus(1, table=table)}fault = "{fault}"\nfault-at = "list"\n'
    daemon.config_file.write_text(config)
    await daemon.restart()
    failed = 'agentd_plugin_ready{plugin="npu"} == 0'
    await prometheus.until(f'{failed} unless on () agentd_plugin_ready{{plugin="tpu"}}')
    raised = {rule["name"]: rule["query"] for rule in await prometheus.alerts()}
    rows = await prometheus.query(raised["AgentdPluginNotReady"])
    assert [row["metric"]["plugin"] for row in rows] == ["npu"]


async def test_promtool_finds_no_fault(scraped: tuple[Daemon, Prometheus]) -> None:
    daemon, _ = scraped
    await daemon.running(kernel_id="k1", slots={"cuda.device": 1})
    text = (await daemon.call("GET", "/metrics")).content
    promtool("check", "metrics", given=text)
    promtool("check", "rules", str(rules_of("agentd")))
