"""Reading the configuration again while the daemon runs: all of what can be taken, or nothing.

What is taken are callers' tokens, the certificate, what each runtime lets kernels have, and the
log's level. Everything else is named in the log, and waits for a restart.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel

from agentd import assembly
from agentd import log as logging
from agentd.config.loading import Loaded, load
from agentd.config.settings import Settings
from agentd.endpoint import renewed_tls, tokens
from agentd.errors import ConfigRefused, StartRefused
from agentd.rpc.server import Server
from agentd.services.interfaces import Runtime

log = structlog.get_logger()

TAKEN = ("rpc.tokens", "rpc.token-file", "rpc.tls-", "node.log-level", "runtime.")
LATER = ("runtime.docker.socket", "runtime.docker.publish-", "runtime.docker.registry-auth")
"""Beginnings of the keys that a reload takes, and of those that it does not after all."""
OUTCOME = "reload.json"
_PAUSE_S, _PATIENCE_S = 0.05, 30.0


def is_taken(key: str) -> bool:
    """Tell whether a reload takes a key."""
    return key.startswith(TAKEN) and not key.startswith(LATER)


def differing(one: BaseModel, other: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the keys by which two configurations differ."""
    for name in type(one).model_fields:
        was, now = getattr(one, name), getattr(other, name)
        key = f"{path}{name.replace('_', '-')}"
        if isinstance(was, BaseModel) and isinstance(now, BaseModel):
            yield from differing(was, now, f"{key}.")
        elif was != now:
            yield key


class Reload:
    """Takes a configuration anew, for a daemon that began with `loaded`."""

    def __init__(self, loaded: Loaded, server: Server, runtimes: Mapping[str, Runtime]) -> None:
        self._loaded = loaded
        self._server = server
        self._runtimes = runtimes

    def take(self) -> list[str]:
        """Read the configuration and take it; return the keys that wait for a restart.

        Raises:
            ConfigRefused: it cannot be used; nothing has changed.
        """
        settings = load(self._loaded.path, self._loaded.environ).settings
        found = tokens(settings.rpc) if settings.rpc.listen else ()
        # Agents wait for a restart, and with them the accounts that they run as.
        running = settings.model_copy(update={"agents": self._loaded.settings.agents})
        steps: list[Callable[[], object]] = [
            lambda: self._server.renew_tokens(found),
            *renewed_tls(settings.rpc, self._server),
            *(assembly.renewal(runtime, running) for runtime in self._runtimes.values()),
            lambda: logging.set_level(settings.node.log_level),
        ]
        for step in steps:
            step()
        return [k for k in differing(self._loaded.settings, settings) if not is_taken(k)]

    def once(self, folder: Path) -> None:
        """Take the configuration, and tell in the log and in a file of the folder how that went."""
        try:
            waiting, reasons = self.take(), list[str]()
        except ConfigRefused as error:
            waiting, reasons = [], error.lines()
            log.warning("daemon.not_reloaded", reasons=reasons)
        else:
            log.info("daemon.reloaded", needs_restart=waiting)
        _write(folder, {"at": time.time(), "needs_restart": waiting, "reasons": reasons})


def _write(folder: Path, outcome: Mapping[str, Any]) -> None:
    unfinished = folder / f".{OUTCOME}.new"
    with suppress(OSError):
        unfinished.write_text(json.dumps(outcome), encoding="utf-8")
        unfinished.replace(folder / OUTCOME)


def outcome(folder: Path) -> dict[str, Any]:
    """Return how the last reload went; empty if there was none."""
    try:
        content = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def ask(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Have the running daemon reload, wait for it, and return what waits for a restart.

    Raises:
        StartRefused: there is none, or it refused; the message has its reasons.
    """
    folder = settings.node.state_dir
    pid = environ.get("MAINPID") or _holder(folder)
    before = outcome(folder)
    try:
        if (number := int(pid)) <= 1:
            raise ValueError
        os.kill(number, signal.SIGHUP)
    except (ValueError, OSError):
        raise StartRefused(f"no daemon of the state folder {folder} runs") from None
    end = time.monotonic() + _PATIENCE_S
    while (now := outcome(folder)) == before:
        if time.monotonic() > end:
            raise StartRefused(f"the daemon said nothing for {_PATIENCE_S:g} s") from None
        time.sleep(_PAUSE_S)
    if now["reasons"]:
        raise StartRefused("not reloaded: " + "; ".join(now["reasons"]))
    return list(now["needs_restart"])


def _holder(folder: Path) -> str:
    """Return the process that holds the lock of a state folder, as it wrote it."""
    try:
        with (folder / "lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # held: the number in it is its holder's
                return file.read(32).decode(errors="replace").strip()
    except OSError as error:
        raise StartRefused(f"{folder / 'lock'}: {error.strerror}") from None
    raise StartRefused(f"no daemon of the state folder {folder} runs")
