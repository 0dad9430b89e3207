"""A real Prometheus scrapes a node, is asked what operators ask, and loads the alert rules."""

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from daemon import AGENTS, Daemon, gpus

MONITORING = Path(__file__).parents[2] / "packaging" / "monitoring"
QUERIES = Path(__file__).parents[2] / "docs" / "how-to" / "monitor.md"
CONFIG = """
global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: agentd
    authorization: {{type: Bearer, credentials_file: {folder}/token}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


pytestmark = pytest.mark.needs("prometheus")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Prometheus:
    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml",
             f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=subprocess.DEVNULL, stderr=(folder / "prometheus.log").open("wb"),
        )  # fmt: skip

    async def ask(self, path: str, **params: str) -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/api/v1/{path}", params=params) as response,
        ):
            content = await response.json()
            assert content["status"] == "success", content
            return content["data"]

    async def query(self, query: str) -> list[dict[str, Any]]:
        return (await self.ask("query", query=query))["result"]

    async def until(self, query: str) -> list[dict[str, Any]]:
        async with asyncio.timeout(30):
            while True:
                try:
                    if found := await self.query(query):
                        return found
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)


@pytest.fixture
async def scraped(plain: Daemon, folder: Path) -> AsyncIterator[tuple[Daemon, Prometheus]]:
    (folder / "token").write_text("a-token-for-prometheus\n")
    (folder / "token").chmod(0o600)
    port, own = free_port(), free_port()
    listen = f'[[rpc.tokens]]\nname = "prometheus"\nfile = "{folder}/token"\nrole = "read"\n'
    plain.configure(AGENTS + gpus(2) + listen)
    text = plain.config_file.read_text().replace("[rpc]\n", f'[rpc]\nlisten = "127.0.0.1:{port}"\n')
    plain.config_file.write_text(text)
    await plain.start()
    rules = MONITORING / "agentd.rules.yml"
    config = CONFIG.format(rules=rules, folder=folder, port=port)
    (folder / "prometheus.yml").write_text(config)
    made = Prometheus(folder, own)
    yield plain, made
    made.process.terminate()
    await asyncio.to_thread(made.process.wait, 20)


async def test_it_answers_what_operators_ask(scraped: tuple[Daemon, Prometheus]) -> None:
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
    (why,) = await prometheus.until('agentd_refusals_total{code="InsufficientResource"}')
    assert why["metric"]["slot"] == "cuda.device"
    buckets = await prometheus.until('agentd_create_seconds_bucket{share="whole",le="+Inf"}')
    assert float(buckets[0]["value"][1]) == 1


async def test_every_documented_query_and_alert_is_one_that_it_takes(scraped) -> None:
    daemon, prometheus = scraped
    await daemon.running(kernel_id="k1", slots={"cuda.device": 1})
    await prometheus.until("agentd_kernels")
    queries = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", QUERIES.read_text(), re.MULTILINE)
    assert len(queries) >= 7
    for query in [*queries, *panels()]:
        assert isinstance(await prometheus.query(query), list)
    groups = (await prometheus.ask("rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 7
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}


def panels() -> list[str]:
    """What the dashboard asks."""
    content = json.loads((MONITORING / "agentd.dashboard.json").read_text())
    found = [target["expr"] for panel in content["panels"] for target in panel.get("targets", ())]
    return [expr.replace("$__rate_interval", "1m").replace("$instance", ".*") for expr in found]


async def test_promtool_finds_no_fault(scraped: tuple[Daemon, Prometheus]) -> None:
    daemon, _ = scraped
    await daemon.running(kernel_id="k1", slots={"cuda.device": 1})
    text = (await daemon.call("GET", "/metrics")).content
    for command, given in (
        (["check", "metrics"], text),
        (["check", "rules", str(MONITORING / "agentd.rules.yml")], b""),
    ):
        done = subprocess.run(["promtool", *command], input=given, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), done.stdout + done.stderr
