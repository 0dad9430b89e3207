"""Check a plugin's devices in real kernels, and print a report that can be filed as evidence.

    python hardware_check.py NAME [--config FILE] [--image IMAGE] [--probe COMMAND] [--json]

Needs an installed agentd, with the plugin, in the environment of the Python that runs it. NAME is a
table of the configuration, or an entry point. After `agentd plugin check NAME`, a separate daemon
with this one plugin gives each device to a kernel, and runs one kernel without a device.

The probe is a shell command. It must exit with 0 in a kernel with a device, and with another status
in a kernel without one. If it prints anything, it must print the devices that it detects.

Exit status: 0 all checks passed, 1 a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import tomlkit

from agentd import __version__
from agentd.client import Client
from agentd.errors import AgentdError

READY_TIMEOUT_S, END_TIMEOUT_S, MEASURED_TIMEOUT_S, POLL_PAUSE_S = 90.0, 60.0, 30.0, 0.1
OPENED = "opened "
"""Prefix of the lines in which a kernel reports the device files that it could open."""
AGENTD = (sys.executable, "-m", "agentd")

Device = Mapping[str, Any]
"""A device of `GET /v1/devices`."""


@dataclass(frozen=True)
class Finding:
    """The result of one check; one that was not `tried` has neither passed nor failed."""

    check: str
    passed: bool
    detail: str = ""
    tried: bool = True


@dataclass
class Report:
    """The findings about a plugin, with its devices and their measurements."""

    plugin: str
    settings: Mapping[str, Any]
    findings: list[Finding]
    devices: list[Device] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the report as Markdown."""
        uname = platform.uname()
        program = f"agentd {__version__}, Python {platform.python_version()}"
        host = f"{uname.system} {uname.release} {uname.machine}, {os.cpu_count()} cores"
        lines = [
            f"# {self.plugin} on real devices",
            "",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {program}, {host}.",
            f"Settings: `{json.dumps(self.settings)}`.",
            "",
            "| device | stable id | slots | model | NUMA node | state |",
            "|---|---|---|---|---|---|",
            *(
                f"| {d['id']} | {d['stable_id']} | {capacities(d)} | {d['model']}"
                f" | {'' if d['numa_node'] is None else d['numa_node']} | {d['state']} |"
                for d in self.devices
            ),
            "",
            "| check | passed | seen |",
            "|---|---|---|",
            *(f"| {f.check} | {verdict(f)} | {cell(f.detail)} |" for f in self.findings),
            "",
            *(f"    {line}" for line in self.measured),
        ]
        return "\n".join(lines)


class Trial:
    """One daemon on one runtime, whose kernels test the devices."""

    def __init__(self, report: Report, runtime: str, options: argparse.Namespace) -> None:
        self._report = report
        self._runtime = runtime
        self._image: str | None = options.image
        self._probe: str = options.probe
        self._name: str = options.name
        self._files: set[str] = set()

    def run(self, config: Mapping[str, Any], folder: Path) -> None:
        """Start a daemon on a folder, test every device, and stop the daemon."""
        folder.chmod(0o711)
        file = folder / "agent.toml"
        file.write_text(tomlkit.dumps(self._settings(config, folder)), encoding="utf-8")
        with (folder / "log").open("w+", encoding="utf-8") as log, daemon(file, log) as process:
            client = Client(folder / "agentd.sock", retry_s=0)
            refusal = wait_ready(process, client, log)
            self._add("a daemon serves it", refusal)
            if refusal:
                return
            try:
                self._try_devices(client)
            except AgentdError as error:
                self._add("the daemon answers", str(error))

    def _settings(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return the settings of a node with the plugin's table, and the operator's runtime."""
        runtimes = config.get("runtime", {})
        docker = {k: v for k, v in runtimes.get("docker", {}).items() if k == "socket"}
        process = {k: v for k, v in runtimes.get("process", {}).items() if k == "user"}
        plugin, table = plugin_table(config, self._name)
        return {
            "node": {
                "id": f"check-{os.getpid()}-{self._runtime}",
                "state-dir": str(folder / "state"),
                "runtime": self._runtime,
            },
            "rpc": {"socket": str(folder / "agentd.sock")},
            "runtime": {"docker": {**docker, "network": "none"}, "process": process},
            "plugins": {
                "allow": [plugin],
                "health-interval": 1,
                self._name: {**table, "plugin": plugin, "required": True},
            },
        }

    def _try_devices(self, client: Client) -> None:
        devices: list[Device] = [
            device for device in client.devices() if device["device_name"] not in ("cpu", "mem")
        ]
        self._report.devices = devices or self._report.devices
        usable = [device for device in devices if device["state"] == "ok"]
        for device in devices:
            if device["state"] != "ok":
                reason = f"{device['state']}: {device['reason']}"
                self._add(f"{device['id']} can be given", reason)
        for device in usable:
            self._files |= device_files(client, device)
        for device in usable:
            self._try_device(client, device)
        self._try_hiding(client)
        if any(f.check == "it measures" and f.passed for f in self._report.findings):
            self._read_measurements(client)

    def _try_device(self, client: Client, device: Device) -> None:
        """Check that a kernel with a device runs, and detects that device."""
        status, output = self._run_kernel(client, f"with-{device['id']}", request_of(device))
        problem = f"it ended with {status}: {output[-300:]}" if status else ""
        problem = problem or self._difference(device, output)
        self._add(f"a kernel with {device['id']} runs", problem, output[-300:])
        if not (self._files or self._probe):
            reason = "there are no device files, and no --probe"
            self._skip(f"that {device['id']} is what a kernel sees", reason)

    def _difference(self, device: Device, output: str) -> str:
        """Return the difference between a kernel's device and the devices that it detected."""
        if self._files and not opened_files(output):
            return f"none of {', '.join(sorted(self._files))} can be opened"
        names = [device["id"], device["stable_id"], *device["aliases"]]
        lines = [line for line in output.splitlines() if not line.startswith(OPENED)]
        detected = "\n".join(lines)
        if detected and not any(name.lower() in detected.lower() for name in names):
            return f"the probe names none of {', '.join(names)}: {detected[-300:]}"
        return ""

    def _try_hiding(self, client: Client) -> None:
        """Check that a kernel without a device detects none."""
        status, output = self._run_kernel(client, "without", {})
        check, opened = "what a kernel without devices sees", ", ".join(opened_files(output))
        if self._probe:
            self._add(check, "" if status else f"the probe ended with 0: {output[-300:]}")
        elif not self._files:
            self._skip(check, "there are no device files, and no --probe")
        elif self._runtime == "process":
            reason = "plain processes are not kept from device files"
            self._skip(check, f"{opened} can be opened: {reason}")
        else:
            self._add(check, f"it opened {opened}" if opened else "")

    def _read_measurements(self, client: Client) -> None:
        own_label, deadline = f'device_name="{self._name}"', time.monotonic() + MEASURED_TIMEOUT_S
        measured: list[str] = []
        while not measured and time.monotonic() < deadline:
            time.sleep(POLL_PAUSE_S)
            lines = client.metrics().splitlines()
            measured = [line for line in lines if own_label in line and "stable_id=" in line]
        self._report.measured = measured or self._report.measured
        problem = "" if measured else f"nothing within {MEASURED_TIMEOUT_S:g} s"
        self._add("the daemon measures it", problem)

    def _run_kernel(
        self, client: Client, kernel_id: str, request: Mapping[str, Any]
    ) -> tuple[int, str]:
        """Run the probe in a kernel to its end; return its exit status and its output."""
        body = {"kernel_id": kernel_id, "command": ["sh", "-c", self._script()], **request}
        if self._runtime == "docker":
            body["image"] = self._image
        client.create_kernel(client.agents()[0]["agent_id"], body)
        try:
            deadline = time.monotonic() + END_TIMEOUT_S
            kernel = client.kernel(kernel_id)
            while kernel["state"] == "running" and time.monotonic() < deadline:
                time.sleep(POLL_PAUSE_S)
                kernel = client.kernel(kernel_id)
            output = b"".join(client.logs(kernel_id))
        finally:
            client.delete_kernel(kernel_id, 0)
        status = kernel["exit_code"]
        return -1 if status is None else int(status), output.decode(errors="replace").strip()

    def _script(self) -> str:
        """Return a kernel's command: open each file for reading and writing, then the probe."""
        files = [
            f"if [ -c {quoted} ] && (exec 3<>{quoted}) 2>/dev/null; then echo {OPENED}{quoted}; fi"
            for quoted in map(shlex.quote, sorted(self._files))
        ]
        return "\n".join([*files, self._probe or "true"])

    def _add(self, check: str, problem: str, seen: str = "") -> None:
        finding = Finding(f"{check} ({self._runtime})", not problem, problem or seen)
        self._report.findings.append(finding)

    def _skip(self, check: str, reason: str) -> None:
        finding = Finding(f"{check} ({self._runtime})", passed=True, detail=reason, tried=False)
        self._report.findings.append(finding)


def plugin_table(config: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """Return the entry point of a plugin, and its settings."""
    table = {k: v for k, v in config.get("plugins", {}).get(name, {}).items() if k != "required"}
    return table.pop("plugin", name), table


def conformance(name: str, config: Path | None) -> list[Finding]:
    """Return the findings of `agentd plugin check`."""
    command = [*AGENTD, "plugin", "check", name, "--json"]
    command += ["--config", str(config)] if config else []
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not result.stdout:
        sys.exit(result.returncode)
    return [Finding(**row) for row in json.loads(result.stdout)]


@contextmanager
def daemon(config: Path, log: TextIO) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon that no variable of the caller configures."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AGENTD__")}
    command = [*AGENTD, "run", "--config", str(config)]
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], client: Client, log: TextIO) -> str:
    """Wait until a daemon serves its API; return the reason if it does not."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    reason = f"not ready within {READY_TIMEOUT_S:g} s"
    while process.poll() is None and time.monotonic() < deadline:
        try:
            client.agents()
        except AgentdError as error:
            reason = str(error)
            time.sleep(POLL_PAUSE_S)
        else:
            return ""
    if process.poll() is None:
        return reason
    log.seek(0)
    return next(reversed(log.read().strip().splitlines()), "it ended without a message")


def request_of(device: Device) -> dict[str, Any]:
    """Return the part of a request that asks for one whole device."""
    return {
        "slots": {device["slot"]: device["capacity"]},
        "devices": {device["device_name"]: [device["id"]]},
    }


def device_files(client: Client, device: Device) -> set[str]:
    """Return the device files that a workload with a device gets, asked through a claim of it."""
    request = {**request_of(device), "claim_id": "check", "holder": {"name": "check"}}
    claim = client.create_claim(client.agents()[0]["agent_id"], request)
    client.release_claim("check")
    return {node["container_path"] for node in claim["edits"]["device_nodes"]}


def opened_files(output: str) -> list[str]:
    """Return the device files that a kernel opened."""
    lines = [line for line in output.splitlines() if line.startswith(OPENED)]
    return [line.removeprefix(OPENED) for line in lines]


def capacities(device: Device) -> str:
    """Return the capacities of a device: `cuda.shares 1, cuda.mem 85899345920`."""
    return ", ".join(f"{slot} {each['capacity']}" for slot, each in device["slots"].items())


def verdict(finding: Finding) -> str:
    """Return a finding in one word."""
    if not finding.tried:
        return "not tried"
    return "yes" if finding.passed else "**no**"


def cell(text: str) -> str:
    """Return a text that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", help="table of the configuration, or entry point")
    parser.add_argument("--config", type=Path, help="configuration with the plugin's table")
    parser.add_argument("--image", help="image of containers to test, too")
    parser.add_argument("--probe", default="", help="shell command that detects a device")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser.parse_args()


def main() -> int:
    """Check the devices on each runtime, and print the report."""
    options = parse_options()
    config = tomllib.loads(options.config.read_text(encoding="utf-8")) if options.config else {}
    plugin, settings = plugin_table(config, options.name)
    report = Report(plugin, settings, conformance(options.name, options.config))
    for runtime in ("process", "docker") if options.image else ("process",):
        with tempfile.TemporaryDirectory(prefix="agentd-check-") as folder:
            Trial(report, runtime, options).run(config, Path(folder))
    if not options.image:
        reason = "name an image with --image"
        report.findings.append(Finding("devices in containers", True, reason, tried=False))
    rows = [asdict(finding) for finding in report.findings]
    print(json.dumps(rows) if options.json else report.text())
    return 0 if all(finding.passed for finding in report.findings) else 1


if __name__ == "__main__":
    sys.exit(main())
