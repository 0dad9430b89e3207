"""The care with which plugins read their devices, over a driver that a test scripts."""

from typing import NamedTuple

import pytest

from agentd.plugin_api import DeviceReads, guard_each


class Refused(Exception):
    """The driver of the tests refuses."""


LOST = Refused("GPU is lost")


class Driver:
    """Devices as text: `A:memory` by key; a refused identity or state is an exception."""

    def __init__(self) -> None:
        self.devices: dict[object, tuple[str | Exception, str | Exception]] = {}
        self.reads = DeviceReads[object, str]("GPU", Refused, OSError)

    def identify(self, key: object) -> str:
        return answer(self.devices[key][0])

    def state(self, key: object, last: str | None) -> str:
        state = answer(self.devices[key][1])
        return f"{state} after {last}" if state == "partial" else state

    def read(self, *devices: tuple[object, str | Exception, str | Exception]) -> list[str]:
        self.devices = {key: (identity, state) for key, identity, state in devices}
        return [
            f"{device.key}={device.identity} {device.state}"
            + (f" ({device.problem})" if device.problem else "")
            for device in self.reads.read(self.devices, self.identify, self.state)
        ]


def answer(value: str | Exception) -> str:
    if isinstance(value, Exception):
        raise value
    return value


class Case(NamedTuple):
    """The answers of a driver at two reads, and the devices and sentences after the second."""

    before: list[tuple[object, str | Exception, str | Exception]]
    now: list[tuple[object, str | Exception, str | Exception]]
    devices: list[str]
    sentences: tuple[str, ...] = ()


TWO = [(0, "A", "80g"), (1, "B", "40g")]
CASES = {
    "all answer": Case(TWO, TWO, ["0=A 80g", "1=B 40g"]),
    "another state": Case(TWO, [(0, "A", "mig"), TWO[1]], ["0=A mig", "1=B 40g"]),
    "one tells its identity alone": Case(
        TWO, [(0, "A", LOST), TWO[1]], ["0=A 80g (GPU is lost)", "1=B 40g"],
    ),
    "one tells nothing": Case(
        TWO, [(0, LOST, LOST), TWO[1]], ["0=A 80g (GPU is lost)", "1=B 40g"],
    ),
    "one tells its identity alone from the start": Case(
        [(0, "A", LOST), TWO[1]], [(0, "A", LOST), TWO[1]], ["0=A None (GPU is lost)", "1=B 40g"],
    ),
    "one told its identity alone, and then nothing": Case(
        [(0, "A", LOST), TWO[1]], [(0, LOST, LOST), TWO[1]],
        ["0=A None (GPU is lost)", "1=B 40g"],
    ),
    "one tells nothing from the start": Case(
        [(0, LOST, LOST), TWO[1]], [(0, LOST, LOST), TWO[1]], ["1=B 40g"],
        ("GPU 0 does not answer: GPU is lost",),
    ),
    "one that told nothing answers": Case(
        [(0, LOST, LOST), TWO[1]], TWO, ["0=A 80g", "1=B 40g"],
    ),
    "a value that the driver no longer tells": Case(
        TWO, [(0, "A", "partial"), TWO[1]], ["0=A partial after 80g", "1=B 40g"],
    ),
    "a replaced device has nothing of the former": Case(
        TWO, [(0, "C", LOST), TWO[1]], ["0=C None (GPU is lost)", "1=B 40g"],
    ),
    "another order": Case(TWO, [(0, "B", LOST), (1, "A", "80g")],
                          ["0=B 40g (GPU is lost)", "1=A 80g"]),
    "one moved, and its former key tells nothing": Case(
        TWO, [(0, LOST, LOST), (1, "A", "80g")], ["1=A 80g"],
        ("GPU 0 does not answer: GPU is lost",),
    ),
    "two keys of one device": Case(
        TWO, [(0, "A", "80g"), (1, "A", LOST)], ["0=A 80g"],
        ("GPU 1 has the identity of GPU 0 and is left out: A",),
    ),
    "two keys of one device that tell nothing": Case(
        [(0, "A", "80g"), (1, "A", "80g")], [(0, LOST, LOST), (1, LOST, LOST)],
        ["0=A 80g (GPU is lost)"], ("GPU 1 does not answer: GPU is lost",),
    ),
    "one that the driver no longer lists": Case(TWO, TWO[1:], ["1=B 40g"]),
    "no devices": Case(TWO, [], []),
    "a file that may not be read": Case(
        [], [("/dev/x", "X", PermissionError(13, "Permission denied", "/dev/x"))],
        ["/dev/x=X None (/dev/x: Permission denied)"],
    ),
    "an error without words": Case(TWO[:1], [(0, "A", Refused())], ["0=A 80g (Refused)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refusal_of_one_device_concerns_it_alone(name: str) -> None:
    case, driver = CASES[name], Driver()
    driver.read(*case.before)
    assert driver.read(*case.now) == case.devices
    assert driver.reads.describe_unidentified() == [*case.sentences]


def test_errors_that_are_no_refusals_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        Driver().read((0, "A", ZeroDivisionError()))


def test_guarded_calls_return_results_and_refusals() -> None:
    answers = {0: "ok", 1: LOST, 2: "ok"}
    results, refusals = guard_each(answers, lambda key: answer(answers[key]), Refused)
    assert (results, refusals) == ({0: "ok", 2: "ok"}, {1: "GPU is lost"})
