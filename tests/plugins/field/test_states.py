"""One device in trouble, of three: it concerns no other one, for every plugin.

Each state is tried while the plugin runs, and from its start.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from native.libraries import amdsmi_library, nvml_library
from plugins.field.amd import AmdRig
from plugins.field.files import FilesRig
from plugins.field.nvidia import NvidiaRig
from plugins.field.rig import OpenPlugin, Rig

RIGS: dict[str, Callable[[Path, pytest.MonkeyPatch, pytest.TempPathFactory], Rig]] = {
    "cuda": lambda folder, patch, factory: NvidiaRig(folder, patch, nvml_library(factory)),
    "rocm": lambda folder, patch, factory: AmdRig(folder, patch, amdsmi_library(factory)),
    "generic": FilesRig,
}


class State(NamedTuple):
    """The second device, once it was well and once it never was."""

    running: str
    started: str


STATES = {
    "lost": State("unhealthy", "absent"),
    "lost behind its handle": State("unhealthy", "absent"),
    "identity alone": State("unhealthy", "unhealthy"),
    "no permission": State("unhealthy", "absent"),
    "missing in the driver": State("absent", "absent"),
    "replaced": State("absent", "absent"),
    "not on PCI": State("healthy", "healthy"),
}


CLASSES = {"cuda": NvidiaRig, "rocm": AmdRig, "generic": FilesRig}
CASES = [(kind, name) for kind, rig in CLASSES.items() for name in STATES if name in rig.words]
"""The states that each driver knows."""
each_state = pytest.mark.parametrize(("rig", "name"), CASES, indirect=["rig"])


@pytest.fixture
def rig(request, tmp_path: Path, monkeypatch, tmp_path_factory) -> Rig:
    return RIGS[request.param](tmp_path, monkeypatch, tmp_path_factory)


@each_state
async def test_state_of_one_device_concerns_it_alone(rig: Rig, name: str) -> None:
    plugin = await OpenPlugin.start(rig)
    well = await plugin.listing()
    rig.bring(name)
    await check(plugin, rig, name, STATES[name].running)
    now = {device.stable_id: device for device in (await plugin.listing()).devices}
    for device in (well.devices[0], well.devices[2]):  # a plugin suggests ids, agentd keeps them
        assert replace(now[device.stable_id], id=device.id) == device
    rig.bring()
    assert await plugin.until(lambda listing: listing == well)
    await plugin.process.kill("over")


@each_state
async def test_state_from_the_start_concerns_one_device_alone(rig: Rig, name: str) -> None:
    rig.bring(name)
    plugin = await OpenPlugin.start(rig)
    await check(plugin, rig, name, STATES[name].started)
    rig.bring()
    listing = await plugin.until(lambda listing: not listing.conditions)
    assert {d.stable_id: d.health for d in listing.devices} == dict.fromkeys(
        rig.stable_ids, "healthy"
    )
    await plugin.process.kill("over")


async def check(plugin: OpenPlugin, rig: Rig, name: str, expected: str) -> None:
    """Check the second device, and that the others are listed, measured and given."""
    first, second, third = rig.stable_ids
    listing = await plugin.listing()
    devices = {device.stable_id: device for device in listing.devices}
    assert {devices[first].health, devices[third].health} == {"healthy"}
    measured = {measurement.stable_id for measurement in await plugin.measure()}
    assert not measured or {first, third} <= measured
    for runtime in ("docker", "systemd", "process"):
        await plugin.edits(first, third, runtime=runtime)
    if expected == "absent":
        assert second not in devices
        conditions = [condition.reason for condition in listing.conditions]
        assert any(rig.words[name] in reason for reason in conditions) or not rig.words[name]
    else:
        assert devices[second].health == expected
        assert rig.words[name] in devices[second].reason
