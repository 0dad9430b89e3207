"""Lists of kernels: filters, order and pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec
from multidict import MultiMapping

from agentd.core.access import Caller
from agentd.core.devices import Inventory
from agentd.core.kernel.states import STARTING, Kernel, KernelState, RemovedKernel
from agentd.errors import InvalidRequest, Problem
from agentd.http.queries import read_labels, read_limit
from agentd.rpc.rendering import kernel_view

MOST_REMOVED = 16_384
"""Removed kernels that `after` may still name."""


class Page(NamedTuple):
    """One page of a list; `next_after` starts the next one, None on the last."""

    kernels: Sequence[Kernel]
    next_after: str | None


class Removed(Protocol):
    """A store of the creation times of removed kernels, kept over restarts."""

    def load(self) -> Sequence[RemovedKernel]: ...

    def add(self, kernel: RemovedKernel) -> None: ...


class CreationOrder:
    """The order of creation, including recently removed kernels."""

    def __init__(self, lasting: Removed | None = None) -> None:
        self._lasting = lasting
        places = lasting.load() if lasting is not None else ()
        self._removed = OrderedDict((place.kernel_id, place) for place in places)

    def note(self, before: Kernel | None, now: Kernel | None) -> None:
        """Remember a removed kernel; a create that failed is not remembered."""
        if now is not None or before is None or before.state in STARTING:
            return
        place = RemovedKernel(before.created_at, before.kernel_id, before.agent_id)
        self._removed[place.kernel_id] = place
        self._removed.move_to_end(place.kernel_id)
        if len(self._removed) > MOST_REMOVED:
            self._removed.popitem(last=False)
        if self._lasting is not None:
            self._lasting.add(place)

    def page(self, kernels: Iterable[Kernel], query: MultiMapping[str], caller: Caller) -> Page:
        """Return the kernels that a query selects with `state`, `label`, `limit` and `after`.

        Raises:
            InvalidRequest: a parameter is invalid, or `after` names an unknown kernel.
        """
        states, labels = _states(query), read_labels(query)
        limit = read_limit(query)
        found = sorted(kernels, key=_place)
        after = query.get("after")
        if after is not None:
            place = self._place_of(after, found, caller)
            found = [kernel for kernel in found if _place(kernel) > place]
        found = [
            kernel
            for kernel in found
            if (not states or kernel.state in states)
            and all(kernel.labels.get(name) == value for name, value in labels)
        ]
        if limit is None or len(found) <= limit:
            return Page(found, None)
        return Page(found[:limit], found[limit - 1].kernel_id)

    def _place_of(
        self, kernel_id: str, visible: Iterable[Kernel], caller: Caller
    ) -> tuple[float, str]:
        for kernel in visible:
            if kernel.kernel_id == kernel_id:
                return _place(kernel)
        removed = self._removed.get(kernel_id)
        if removed is not None and caller.sees(removed.agent_id):
            return removed.created_at, removed.kernel_id
        why = f"unknown kernel {kernel_id!r} (also among the last {MOST_REMOVED} removed ones)"
        raise InvalidRequest([Problem("after", why)])


def _place(kernel: Kernel) -> tuple[float, str]:
    return kernel.created_at, kernel.kernel_id


def _states(query: MultiMapping[str]) -> frozenset[KernelState]:
    given = query.getall("state", [])
    known = {state.value for state in KernelState}
    if unknown := sorted(set(given) - known):
        why = f"invalid state {', '.join(unknown)}: expected one of {', '.join(sorted(known))}"
        raise InvalidRequest([Problem("state", why)])
    return frozenset(KernelState(value) for value in given)


class Encodings:
    """A cache of kernels as JSON; most do not change between two lists."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Kernel, Inventory, bytes]] = {}

    def of(self, kernels: Iterable[Kernel], inventory: Inventory) -> bytes:
        """Return a JSON array of kernels."""
        return b"[%s]" % b",".join(self._encoded(kernel, inventory) for kernel in kernels)

    def keep_only(self, kernels: Collection[str]) -> None:
        """Drop every cached kernel that is not in `kernels`."""
        for gone in self._kept.keys() - set(kernels):
            del self._kept[gone]

    def _encoded(self, kernel: Kernel, inventory: Inventory) -> bytes:
        known = self._kept.get(kernel.kernel_id)
        if known is not None and known[0] is kernel and known[1] is inventory:
            return known[2]
        encoded = msgspec.json.encode(kernel_view(kernel, inventory))
        self._kept[kernel.kernel_id] = (kernel, inventory, encoded)
        return encoded
