"""The capabilities of an engine, read from its own answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentd.core.kernel.edits import ContainerEdits
from agentd.errors import RuntimeFailure
from agentd.plugin_api import Features

_SLOT_BY_LIMIT = {"MemoryLimit": "mem", "CPUSet": "cpu", "PidsLimit": "pids_limit"}
_DEVICE_REQUESTS_SINCE, _READ_ONLY_BELOW_SINCE = (1, 40), (1, 44)


class DockerFacts(msgspec.Struct, frozen=True):
    """Features for plugins, and limits that the engine cannot enforce."""

    features: Features
    not_enforced: frozenset[str]
    restores_live: bool = False
    """Whether containers outlive the engine."""
    reads_recursively: bool = False
    """Whether a read-only mount can cover its submounts, too."""

    def refuse_unsupported(self, edits: ContainerEdits) -> None:
        """Refuse edits that this engine does not support, before anything is created.

        Raises:
            RuntimeFailure: the engine would ignore them, or fail late.
        """
        if edits.cdi and not self.features.cdi:
            names = ", ".join(edits.cdi)
            raise RuntimeFailure(
                f"this engine does not support CDI ({names}); requires Engine 25 or later"
                " with CDI enabled"
            )
        if edits.device_requests and not self.features.device_requests:
            drivers = ", ".join(request.driver for request in edits.device_requests)
            raise RuntimeFailure(f"this engine does not support device requests ({drivers})")


def parse_docker_facts(info: Mapping[str, Any], version: Mapping[str, Any]) -> DockerFacts:
    """Parse the responses of `/info` and `/version`."""
    cdi_spec_dirs = tuple(map(str, info.get("CDISpecDirs") or ()))
    api = tuple(int(part) for part in str(version.get("ApiVersion", "1.40")).split("."))
    features = Features(
        "docker",
        cdi=bool(cdi_spec_dirs),
        device_requests=api >= _DEVICE_REQUESTS_SINCE,
        cdi_spec_dirs=cdi_spec_dirs,
    )
    not_enforced = {slot for member, slot in _SLOT_BY_LIMIT.items() if info.get(member) is False}
    return DockerFacts(
        features,
        frozenset(not_enforced),
        restores_live=info.get("LiveRestoreEnabled") is True,
        reads_recursively=api >= _READ_ONLY_BELOW_SINCE,
    )
