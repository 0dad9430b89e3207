"""Units of the field whose bundle cannot be read, or is gone; errno by errno."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentd.core.kernel.states import ObservedState
from agentd.errors import RuntimeUnavailable
from agentd.runtimes.systemd.unit_observer import UnitObserver
from agentd.runtimes.systemd.unit_state import OBSERVED_PROPERTIES
from contracts.test_runtime import NODE, plan

RECORD = plan("sleep", "1000").record
LABEL = "cuda/cuda0/cuda.device=1@GPU-1"
ACTIVE: dict[str, Any] = {
    **dict.fromkeys(OBSERVED_PROPERTIES, 0),
    "Unit.ActiveState": "active",
    "Unit.SubState": "running",
    "Unit.InvocationID": b"\x01" * 16,
    "ControlGroup": "",
    "LogExtraFields": [b"AGENTD_AGENT=agent-1", f"AGENTD_DEVICES={LABEL}".encode()],
    "ExecMainStartTimestamp": 1_000_000,
    "MainPID": 4711,
}
UNREADABLE = ("EACCES", "EPERM", "EIO", "ESTALE", "ELOOP", "ENOTDIR", "ETIMEDOUT", "ENODEV")


def observer(folder: Path, properties: dict[str, Any] | None) -> UnitObserver:
    """An observer whose manager knows one unit, or none."""

    async def get_properties(unit: str, names: object) -> dict[str, Any] | None:
        return properties

    manager = SimpleNamespace(is_user=True, get_properties=get_properties)
    return UnitObserver(folder, NODE, "boot", manager)  # type: ignore[arg-type]


def failing(monkeypatch: pytest.MonkeyPatch, path: Path, name: str) -> None:
    """Make every look into a folder fail."""
    genuine, number = os.open, getattr(errno, name)

    def fails(target: object, *args: Any, **kwargs: Any) -> int:
        if target == path:
            raise OSError(number, os.strerror(number), str(path))
        return genuine(target, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", fails)


@pytest.mark.parametrize("name", UNREADABLE)
async def test_unit_with_an_unreadable_bundle_is_held(tmp_path, monkeypatch, name: str) -> None:
    observing = observer(tmp_path, ACTIVE)
    bundle = observing.bundle("k1")
    bundle.create(RECORD, {})
    with monkeypatch.context() as patch:
        failing(patch, bundle.path, name)
        kernel = await observing.find("k1")
    assert kernel is not None
    assert (kernel.state, kernel.is_unreadable) == (ObservedState.RUNNING, True)
    assert os.strerror(getattr(errno, name)) in kernel.record_problem
    assert (kernel.device_label, kernel.pid) == (LABEL, 4711)
    mended = await observing.find("k1")
    assert mended is not None
    assert (mended.is_unreadable, mended.record) == (False, RECORD)


@pytest.mark.parametrize("name", ["EMFILE", "ENOMEM", "EINTR"])
async def test_shortage_proves_nothing_of_a_unit(tmp_path, monkeypatch, name: str) -> None:
    observing = observer(tmp_path, ACTIVE)
    observing.bundle("k1").create(RECORD, {})
    failing(monkeypatch, observing.bundle("k1").path, name)
    with pytest.raises(RuntimeUnavailable):
        await observing.find("k1")


async def test_unit_without_its_bundle_keeps_its_devices(tmp_path: Path) -> None:
    kernel = await observer(tmp_path, ACTIVE).find("k1")
    assert kernel is not None
    assert (kernel.state, kernel.is_unreadable) == (ObservedState.RUNNING, False)
    assert (kernel.record, kernel.device_label) == ("", LABEL)


async def test_missing_unit_proves_the_end_of_an_unreadable_bundle(tmp_path, monkeypatch) -> None:
    observing = observer(tmp_path, None)
    observing.bundle("k1").create(RECORD, {})
    failing(monkeypatch, observing.bundle("k1").path, "ESTALE")
    kernel = await observing.find("k1")
    assert kernel is not None
    assert (kernel.state, kernel.is_unreadable) == (ObservedState.EXITED, True)
    assert "its exit status cannot be read" in kernel.ending.reason
