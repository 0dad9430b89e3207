"""The schemas of the files in the state folder, validated on reading.

Unknown members, written by a newer agentd, are skipped. A value of the wrong type raises, so no
damaged value gets past this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentd.core.devices import Device
from agentd.core.kernel.record import MALFORMED

SCHEMA = 1
UNREADABLE = (*MALFORMED, msgspec.MsgspecError)
"""The errors that reading a damaged file raises."""


class SavedNode(msgspec.Struct):
    """`node.json`: the node id of the kernels here, and the runtimes that may have some."""

    node_id: str
    runtimes: list[str]
    schema: int = SCHEMA


class SavedDevices(msgspec.Struct):
    """`devices.json`: the last inventory."""

    devices: Sequence[Device]
    schema: int = SCHEMA
