"""Reads of a driver's devices, in which a refusal about one device concerns that device alone.

A driver is asked about its devices one after another, by key: an index, or a path. A device that
refuses is as it was last read in full, with the driver's own words. A device that tells its
identity alone does not replace what was read before, and is not a state to return to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_State = TypeVar("_State")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class DeviceRead(Generic[_Key, _State]):
    """A device as its driver reports it now, or as it was last read in full.

    `problem` has the driver's words if it refuses now; list such a device as unhealthy. `state` is
    None if it has refused since the plugin started: agentd then knows its form from earlier, by
    the `identity`.
    """

    key: _Key
    identity: str
    state: _State | None
    problem: str = ""


def guard_each(
    keys: Iterable[_Key], call: Callable[[_Key], _Result], *refusals: type[Exception]
) -> tuple[dict[_Key, _Result], dict[_Key, str]]:
    """Call a function for each device, and return the results and the refusals by key.

    `refusals` are the exceptions of the driver; any other one is raised. A refusal is the driver's
    words.
    """
    results: dict[_Key, _Result] = {}
    refused: dict[_Key, str] = {}
    for key in keys:
        try:
            results[key] = call(key)
        except refusals as error:
            refused[key] = refusal_words(error)
    return results, refused


def refusal_words(error: Exception) -> str:
    """Return the text of a driver's exception, in one line; of an OSError, its file and reason."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


class DeviceReads(Generic[_Key, _State]):
    """The devices of one driver, over many reads.

    `noun` names a device for people, such as `GPU`. `refusals` are the exceptions with which the
    driver refuses to tell something about a device.
    """

    def __init__(self, noun: str, *refusals: type[Exception]) -> None:
        self._noun = noun
        self._refusals = refusals
        self._identities: dict[_Key, str] = {}
        self._states: dict[str, _State] = {}
        self._left_out: dict[_Key, str] = {}

    def read(
        self,
        keys: Iterable[_Key],
        identify: Callable[[_Key], str],
        read: Callable[[_Key, _State | None], _State],
    ) -> list[DeviceRead[_Key, _State]]:
        """Read all devices, in the order of `keys`, each identity once.

        `identify` returns the identity of the device with a key. `read` returns the whole state,
        and gets the last one, for values that the driver no longer reports. A refusal of
        `identify` means the device that had the key before, unless another key has it now, or
        refuses and had it, too.
        """
        keys = [*keys]
        identities, refused = guard_each(keys, identify, *self._refusals)
        present = {*identities.values()}
        self._left_out = {}
        for key, words in refused.items():
            last = self._identities.get(key)
            if last is None or last in present:
                self._left_out[key] = f"does not answer: {words}"
            else:
                identities[key] = last
                present.add(last)
        self._identities |= identities
        key_of = {identities[key]: key for key in reversed(keys) if key in identities}
        self._left_out |= {
            key: f"has the identity of {self._noun} {first} and is left out: {identity}"
            for key, identity in identities.items()
            if (first := key_of[identity]) != key
        }

        def read_state(key: _Key) -> _State:
            return read(key, self._states.get(identities[key]))

        answering = [key for key in key_of.values() if key not in refused]
        states, problems = guard_each(answering, read_state, *self._refusals)
        self._states |= {identities[key]: state for key, state in states.items()}
        problems |= refused
        return [
            DeviceRead(key, identity, self._states.get(identity), problems.get(key, ""))
            for key in keys
            if (identity := identities.get(key, "")) and key_of[identity] == key
        ]

    def describe_unidentified(self) -> list[str]:
        """Return a sentence for each device that the last read left out.

        It has no known identity, or that of another one.
        """
        return [f"{self._noun} {key} {words}" for key, words in self._left_out.items()]
