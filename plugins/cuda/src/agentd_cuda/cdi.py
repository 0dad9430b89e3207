"""CDI names of GPUs, from the specifications in the engine's folders.

Format: https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

KIND = "nvidia.com/gpu"


def resolve_names(uuids: Sequence[str], spec_dirs: Sequence[str]) -> tuple[str, ...]:
    """Return the full names of all GPUs, or nothing unless every one of them is specified.

    Only names by UUID count: an index may mean another GPU since the file was written.
    """
    known = set(_read_names(spec_dirs))
    return tuple(f"{KIND}={uuid}" for uuid in uuids) if known.issuperset(uuids) else ()


def _read_names(spec_dirs: Sequence[str]) -> Iterator[str]:
    for folder in map(Path, spec_dirs):
        for file in sorted((*folder.glob("*.json"), *folder.glob("*.yaml"))):
            try:
                content = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError, yaml.YAMLError):
                continue
            if isinstance(content, dict) and content.get("kind") == KIND:
                devices = content.get("devices")
                for device in devices if isinstance(devices, list) else ():
                    if isinstance(device, dict):
                        yield str(device.get("name", ""))
