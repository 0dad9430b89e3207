"""A real Prometheus, with the alert rules, dashboards and questions that come with agentd."""

import asyncio
import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "packaging" / "monitoring"
CONFIG = """
global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: {job}
    authorization: {{type: Bearer, credentials_file: {token}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def rules_of(job: str) -> Path:
    """Return the file of alert rules for a job."""
    return MONITORING / f"{job}.rules.yml"


class Prometheus:
    """Scrapes one target every 200 ms, under the alert rules of its job."""

    def __init__(self, folder: Path, job: str, port: int, token: Path) -> None:
        own = free_port()
        self.url = f"http://127.0.0.1:{own}"
        config = CONFIG.format(rules=rules_of(job), job=job, token=token, port=port)
        (folder / "prometheus.yml").write_text(config)
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml",
                 f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address=127.0.0.1:{own}"],
                stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    async def stop(self) -> None:
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 20)

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
        """Wait until a query has a result, and return it."""
        async with asyncio.timeout(30):
            while True:
                try:
                    if found := await self.query(query):
                        return found
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)

    async def alerts(self) -> list[dict[str, Any]]:
        """Return the alert rules as they were loaded."""
        groups = (await self.ask("rules"))["groups"]
        return [rule for group in groups for rule in group["rules"]]


def panels(job: str) -> list[str]:
    """Return the queries of a job's dashboard."""
    content = json.loads((MONITORING / f"{job}.dashboard.json").read_text())
    found = [target["expr"] for panel in content["panels"] for target in panel.get("targets", ())]
    return [expr.replace("$__rate_interval", "1m").replace("$instance", ".*") for expr in found]


def documented(page: str) -> list[str]:
    """Return the queries in the table "What to ask" of a page."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", text, re.MULTILINE)


def promtool(*command: str, given: bytes = b"") -> str:
    """Run promtool, which has to succeed without a warning; return its output."""
    done = subprocess.run(["promtool", *command], input=given, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b""), done.stdout + done.stderr
    return done.stdout.decode()
