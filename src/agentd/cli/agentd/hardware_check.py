"""The part of `agentd plugin check` that tests real devices through a separate daemon.

A daemon with this one plugin runs on a temporary folder and creates kernels over its socket: one
for each device, and one without a device. The report names the host, so that it can be filed.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import tomlkit

from agentd import __version__
from agentd.client import Client, calls
from agentd.config.loading import Loaded
from agentd.core.slots import CPU, MEM
from agentd.errors import AgentdError
from agentd.pluginhost.conformance import MEASURES, Finding
from agentd.pluginhost.instance import Wanted

READY_TIMEOUT_S, END_TIMEOUT_S, MEASURED_TIMEOUT_S, LOOK_PAUSE_S = 90.0, 60.0, 30.0, 0.1
_OPENED = "opened "


@dataclass(frozen=True)
class Ways:
    """The means of a test: an image for containers (None: processes only), and a probe.

    `probe` is run by a shell in every kernel, and ends with 0 only where it sees a device; if it
    prints anything, it names the devices that it sees.
    """

    image: str | None = None
    probe: str = ""


@dataclass(frozen=True)
class Report:
    """The findings, with the devices of `GET /v1/devices` and their measurements."""

    plugin: str
    settings: dict[str, Any]
    devices: list[Mapping[str, Any]]
    measured: list[str]
    findings: list[Finding]

    def text(self) -> str:
        """Return the report as Markdown."""
        machine = platform.uname()
        program = f"agentd {__version__}, Python {platform.python_version()}"
        host = f"{machine.system} {machine.release} {machine.machine}, {os.cpu_count()} cores"
        lines = [
            f"# {self.plugin} on real devices",
            "",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {program}, {host}.",
            f"Settings: `{json.dumps(self.settings)}`.",
            "",
            "| device | stable id | slots | model | NUMA node | state |",
            "|---|---|---|---|---|---|",
            *(
                f"| {d['id']} | {d['stable_id']} | {_slots(d)} | {d['model']}"
                f" | {'' if d['numa_node'] is None else d['numa_node']} | {d['state']} |"
                for d in self.devices
            ),
            "",
            "| check | passed | seen |",
            "|---|---|---|",
            *(f"| {f.check} | {_verdict(f)} | {_cell(f.detail)} |" for f in self.findings),
            "",
            *(f"    {line}" for line in self.measured),
        ]
        return "\n".join(lines)


def tried(
    wanted: Wanted,
    loaded: Loaded,
    files: Mapping[str, Sequence[str]],
    ways: Ways,
    before: list[Finding],
) -> Report:
    """Test a plugin's devices on every available runtime, and return the report.

    `files` are the device files that the plugin says its devices need, by runtime; `before` what
    is known already, and stands first in the report.
    """
    findings = [*before]
    devices: list[Mapping[str, Any]] = []
    measured: list[str] = []
    measures = any(finding.check == MEASURES and finding.passed for finding in before)
    runtimes = ["process", *(["docker"] if ways.image else [])]
    for runtime in runtimes:
        mine = files.get(runtime, ())
        trial = _Trial(wanted, loaded, runtime, mine, ways, measures=measures)
        with tempfile.TemporaryDirectory(prefix="agentd-check-") as folder:
            trial.run(Path(folder))
        findings += trial.findings
        devices, measured = trial.devices or devices, trial.measured or measured
    if ways.image is None:
        why = "name an image with --image"
        findings.append(Finding("devices in containers", passed=True, detail=why, tried=False))
    settings = {key: value for key, value in wanted.settings.items() if key != "required"}
    return Report(wanted.plugin, settings, devices, measured, findings)


class _Trial:
    """One daemon on one runtime."""

    def __init__(
        self,
        wanted: Wanted,
        loaded: Loaded,
        runtime: str,
        files: Sequence[str],
        ways: Ways,
        *,
        measures: bool,
    ) -> None:
        self._wanted = wanted
        self._loaded = loaded
        self._runtime = runtime
        self._files = files
        self._ways = ways
        self._measures = measures
        self.findings: list[Finding] = []
        self.devices: list[Mapping[str, Any]] = []
        self.measured: list[str] = []

    def run(self, folder: Path) -> None:
        """Start a daemon on `folder`, test every device, and stop it."""
        folder.chmod(0o711)
        config = folder / "agent.toml"
        config.write_text(self._config(folder), encoding="utf-8")
        with (folder / "log").open("w+", encoding="utf-8") as log, _daemon(config, log) as daemon:
            client = Client(folder / "agentd.sock", retry_s=0)
            if why := self._not_ready(daemon, client, log):
                self._say("a daemon serves it", why)
                return
            self._say("a daemon serves it", "")
            try:
                self._try_devices(client)
            except AgentdError as error:
                self._say("the daemon answers", str(error))

    def _config(self, folder: Path) -> str:
        settings, wanted = self._loaded.settings, self._wanted
        docker = settings.runtime.docker
        table = {**wanted.settings, "plugin": wanted.plugin, "required": True}
        content = {
            "node": {
                "id": f"check-{os.getpid()}-{self._runtime}",
                "state-dir": str(folder / "state"),
                "runtime": self._runtime,
            },
            "rpc": {"socket": str(folder / "agentd.sock")},
            "runtime": {
                "docker": {"socket": str(docker.socket), "network": "none"},
                "process": {"user": settings.runtime.process.user},
            },
            "plugins": {"allow": [wanted.plugin], "health-interval": 1, wanted.name: table},
        }
        return tomlkit.dumps(content)

    def _not_ready(self, daemon: subprocess.Popen[bytes], client: Client, log: TextIO) -> str:
        """Wait until the daemon is ready; return the reason if it is not, else nothing."""
        end = time.monotonic() + READY_TIMEOUT_S
        why = f"not ready within {READY_TIMEOUT_S:g} s"
        while daemon.poll() is None and time.monotonic() < end:
            try:
                client.carry_out(calls.ready())
            except AgentdError as error:
                why = str(error)
                time.sleep(LOOK_PAUSE_S)
            else:
                return ""
        log.seek(0)
        if daemon.poll() is None:
            return why
        return next(reversed(log.read().strip().splitlines()), "it ended without a word")

    def _try_devices(self, client: Client) -> None:
        shown = client.devices()
        self.devices = [device for device in shown if device["device_name"] not in (CPU, MEM)]
        for device in self.devices:
            if device["state"] != "ok":
                what = f"{device['id']} can be given"
                self._say(what, f"{device['state']}: {device['reason']}")
                continue
            device_id, slot = device["id"], device["slot"]
            check = f"a kernel with {device_id} runs"
            body = {
                "slots": {slot: device["capacity"]},
                "devices": {device["device_name"]: [device_id]},
            }
            status, output = self._kernel(client, f"with-{len(self.findings)}", body)
            wrong = f"it ended with {status}: {output[-300:]}" if status else ""
            self._say(check, wrong or self._unlike(device, output), output[-300:])
            if not (self._files or self._ways.probe):
                why = "there are no device files, and no --probe"
                self._leave_out(f"that {device_id} is what a kernel sees", why)
        self._try_hiding(client)
        if self._measures:
            self._read_measurements(client)

    def _read_measurements(self, client: Client) -> None:
        mine, end = f'device_name="{self._wanted.name}"', time.monotonic() + MEASURED_TIMEOUT_S
        while not self.measured and time.monotonic() < end:
            time.sleep(LOOK_PAUSE_S)
            lines = client.metrics().splitlines()
            self.measured = [line for line in lines if mine in line and "stable_id=" in line]
        wrong = "" if self.measured else f"nothing within {MEASURED_TIMEOUT_S:g} s"
        self._say("the daemon measures it", wrong)

    def _unlike(self, device: Mapping[str, Any], output: str) -> str:
        """Return the difference between a kernel's device and the devices that it detected."""
        if self._files and not _opened(output):
            return f"none of {', '.join(self._files)} can be opened"
        names = [device["id"], device["stable_id"], *device["aliases"]]
        said = "\n".join(line for line in output.splitlines() if not line.startswith(_OPENED))
        if said and not any(name.lower() in said.lower() for name in names):
            return f"the probe names none of {', '.join(names)}: {said[-300:]}"
        return ""

    def _try_hiding(self, client: Client) -> None:
        """Check that a kernel without a device detects none."""
        status, output = self._kernel(client, "without", {})
        check, opened = "what a kernel without devices sees", _opened(output)
        if self._ways.probe:
            self._say(check, "" if status else f"the probe ended with 0: {output[-300:]}")
        elif not self._files:
            self._leave_out(check, "there are no device files, and no --probe")
        elif self._runtime == "process":
            kept = "plain processes are not kept from device files"
            self._leave_out(check, f"{', '.join(opened)} can be opened: {kept}")
        else:
            self._say(check, f"it opened {', '.join(opened)}" if opened else "")

    def _kernel(self, client: Client, kernel_id: str, body: dict[str, Any]) -> tuple[int, str]:
        """Run the probe in a kernel to its end; return its exit status and its output."""
        kernel = {"kernel_id": kernel_id, "command": ["sh", "-c", self._script()], **body}
        if self._runtime == "docker":
            kernel["image"] = self._ways.image
        agent = client.agents()[0]["agent_id"]
        client.create_kernel(agent, kernel)
        try:
            end = time.monotonic() + END_TIMEOUT_S
            state = client.kernel(kernel_id)
            while state["state"] == "running" and time.monotonic() < end:
                time.sleep(LOOK_PAUSE_S)
                state = client.kernel(kernel_id)
            output = b"".join(client.logs(kernel_id))
        finally:
            client.delete_kernel(kernel_id, 0)
        status = state["exit_code"]
        return -1 if status is None else int(status), output.decode(errors="replace").strip()

    def _script(self) -> str:
        """Return a kernel's command: open each file for reading and writing, then the probe."""
        files = [
            f"if [ -c {quoted} ] && (exec 3<>{quoted}) 2>/dev/null; then echo {_OPENED}{quoted}; fi"
            for quoted in map(shlex.quote, self._files)
        ]
        return "\n".join([*files, self._ways.probe or "true"])

    def _say(self, check: str, wrong: str, seen: str = "") -> None:
        found = Finding(f"{check} ({self._runtime})", passed=not wrong, detail=wrong or seen)
        self.findings.append(found)

    def _leave_out(self, check: str, why: str) -> None:
        name = f"{check} ({self._runtime})"
        self.findings.append(Finding(name, passed=True, detail=why, tried=False))


def _slots(device: Mapping[str, Any]) -> str:
    """Return the capacities of a device: `cuda.shares 1, cuda.mem 85899345920`."""
    return ", ".join(f"{slot} {each['capacity']}" for slot, each in device["slots"].items())


def _verdict(finding: Finding) -> str:
    if not finding.tried:
        return "not tried"
    return "yes" if finding.passed else "**no**"


@contextmanager
def _daemon(config: Path, log: TextIO) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "agentd", "run", "--config", str(config)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AGENTD")}
    daemon = subprocess.Popen(command, stdout=log, stderr=log, env=environ)  # noqa: S603 - our own program
    try:
        yield daemon
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _opened(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if line.startswith(_OPENED)]
    return [line.removeprefix(_OPENED) for line in lines]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
