"""Image pulls: one at a time for each image, shared by all creates that wait for it.

The engine stops a pull when its client disconnects, so a pull without waiting creates is cancelled.
So is one that stands still: its registry, or the engine, would hold its creates for ever.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import structlog

from agentd.core.kernel.states import Pull
from agentd.errors import ImageUnavailable, RuntimeUnavailable
from agentd.runtimes.docker.docker_client import DockerClient
from agentd.runtimes.docker.docker_errors import (
    DockerError,
    DockerResponseLost,
    DockerUnreachable,
)
from agentd.runtimes.docker.error_translation import translate_failed_pull
from agentd.runtimes.docker.registry_auth import RegistryLogins
from agentd.shared_calls import SharedCalls

log = structlog.get_logger()

_DONE_STATUSES = ("Download complete", "Pull complete", "Already exists")
_COMPLETE_PREFIX = "Status: "
"""Prefix of the last line of a complete pull."""
STALL_TIMEOUT_S = 1800.0
"""Seconds without progress that end a pull; an engine is silent while it unpacks a large layer."""
_PAUSE_S = 0.2
"""Seconds between two progress reports."""

Listener: TypeAlias = Callable[[Pull], None]
_Key: TypeAlias = tuple[str, str | None, Path | None]
"""Image, platform and credentials: no agent waits for a pull with another agent's."""


class Images:
    """The images of an engine."""

    def __init__(self, docker: DockerClient) -> None:
        self._docker = docker
        self._logins: dict[Path, RegistryLogins] = {}
        """By file of credentials: none waits for another that does not answer."""
        self._pulls: SharedCalls[_Key, None] = SharedCalls()
        self._listeners: dict[_Key, list[Listener]] = {}

    async def pull(
        self, image: str, platform: str | None, registry_auth: Path | None, listener: Listener
    ) -> None:
        """Pull an image with the credentials in a file, or join the same pull in progress.

        `listener` gets the progress.

        Raises:
            ImageNotFound, ImageUnavailable: its registry refuses it, or fails.
            StateUnavailable: the node has no room for it.
            RuntimeUnavailable: the engine did not answer.
        """
        image = _add_default_tag(image)
        key = (image, platform, registry_auth)
        listeners = self._listeners.setdefault(key, [])
        listeners.append(listener)
        try:
            await self._pulls.call(key, partial(self._pull, key))
        finally:
            listeners.remove(listener)
            if not listeners:
                del self._listeners[key]

    async def _pull(self, key: _Key) -> None:
        image = key[0]
        layers: dict[str, Pull] = {}
        last_lines: dict[str, dict[str, Any]] = {}
        quiet_until, loop = 0.0, asyncio.get_running_loop()
        log.info("image.pull_started", image=image)
        try:
            is_complete = False
            async with (
                asyncio.timeout(STALL_TIMEOUT_S) as deadline,
                aclosing(self._read_progress(*key)) as lines,
            ):
                async for line in lines:
                    if line != last_lines.get(layer := str(line.get("id"))):  # not a repetition
                        last_lines[layer] = line
                        deadline.reschedule(loop.time() + STALL_TIMEOUT_S)
                    if failure := _parse_failure(line):
                        raise translate_failed_pull(image, *failure)
                    is_complete |= str(line.get("status")).startswith(_COMPLETE_PREFIX)
                    if _update_layer(layers, line) and time.monotonic() >= quiet_until:
                        quiet_until = time.monotonic() + _PAUSE_S
                        self._notify(key, layers)
            if not is_complete:
                raise RuntimeUnavailable(f"the pull of {image} was interrupted")
        except DockerError as error:
            raise translate_failed_pull(image, error.detail, error.status) from error
        except DockerUnreachable as error:
            raise RuntimeUnavailable(str(error)) from error
        except TimeoutError as error:
            reason = f"its pull made no progress for {STALL_TIMEOUT_S:g} s"
            raise ImageUnavailable(f"image {image}: {reason}") from error
        except (DockerResponseLost, OSError, ValueError) as error:
            raise RuntimeUnavailable(f"the pull of {image} was interrupted: {error}") from error
        log.info("image.pulled", image=image)

    async def _read_progress(
        self, image: str, platform: str | None, registry_auth: Path | None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Start a pull and yield its progress lines; closing the generator stops the pull."""
        params = {"fromImage": image}
        if platform:
            params["platform"] = platform
        headers = {}
        if registry_auth is not None:
            logins = self._logins.setdefault(registry_auth, RegistryLogins(registry_auth))
            if credentials := await logins.find(image):
                encoded = urlsafe_b64encode(json.dumps(credentials).encode()).decode()
                headers["X-Registry-Auth"] = encoded
        async with self._docker.stream("POST", "/images/create", params, headers) as stream:
            async for line in stream:
                yield msgspec.json.decode(line, type=dict[str, Any])

    def _notify(self, key: _Key, layers: Mapping[str, Pull]) -> None:
        current = sum(layer.current for layer in layers.values())
        total = sum(layer.total for layer in layers.values())
        for listener in list(self._listeners.get(key, ())):
            listener(Pull(current, total))


def _add_default_tag(image: str) -> str:
    return image if {":", "@"} & set(image.rpartition("/")[2]) else f"{image}:latest"


def _parse_failure(line: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the message and the status of a line that ends a pull, None for other lines.

    Engines send `error`, `errorDetail`, or both.
    """
    detail = line.get("errorDetail")
    if not isinstance(detail, dict):
        detail = {}
    message, status = detail.get("message") or line.get("error"), detail.get("code")
    if not message and not detail:
        return None
    return str(message or "no reason given"), status if isinstance(status, int) else 0


def _update_layer(layers: dict[str, Pull], line: Mapping[str, Any]) -> bool:
    """Update a layer from a progress line; return whether the line has progress."""
    layer, status = str(line.get("id")), line.get("status", "")
    if status == "Downloading":
        layers[layer] = msgspec.convert(line.get("progressDetail") or {}, Pull)
        return True
    if layer in layers and status in _DONE_STATUSES:
        layers[layer] = Pull(layers[layer].total, layers[layer].total)
        return True
    return False
