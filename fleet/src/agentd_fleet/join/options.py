"""The publisher's settings, and its credentials, which are read again while it runs.

Another process reads them, as at the start: the parser of the settings and the parser of
certificates would stay in the memory of this one.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import ssl
import time
from collections.abc import Callable
from functools import partial
from subprocess import PIPE
from typing import Literal

import msgspec
import structlog

from agentd.client.tls import client_tls
from agentd.concurrency import call_in_time, wait_event
from agentd.program.process import python_command
from agentd.program.weaknesses import Weakness, Weaknesses
from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_transport import EtcdCredentials

log = structlog.get_logger()

LOOK_S = 1.0
"""Seconds after which a publisher that cannot write looks for changed files of credentials."""
RETRY_S = 10.0
"""Seconds after which it reads unusable files again that did not change: each is a process."""


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher's settings of `[fleet]` and `[join]`; files are paths.

    `changed_at` has the time of each file of credentials, from before it was read with success; a
    file that the settings name and that was not read is there, too.
    After a reload, `refused` has the reasons why the settings, the password or the files of TLS
    could not be replaced.
    """

    config: str | None = None
    name: str
    etcd: tuple[str, ...]
    etcd_user: str = ""
    etcd_password_file: str | None = None
    password: str = ""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    socket: str
    url: str = ""
    labels: dict[str, str] = {}
    lease: int
    state_dir: str
    changed_at: dict[str, int] = {}
    refused: dict[Literal["settings", "password", "tls"], str] = {}
    weaknesses: tuple[Weakness, ...] = ()

    def to_credentials(self, tls: ssl.SSLContext | None = None) -> EtcdCredentials:
        """Return the credentials for etcd, with the endpoints in random order.

        Without a TLS context they have that of the files.

        Raises:
            OSError, ValueError: a certificate cannot be read.
        """
        endpoints = random.sample(self.etcd, len(self.etcd))
        tls = tls or etcd_tls_context(self)
        return EtcdCredentials(tuple(endpoints), self.etcd_user, self.password, tls)

    @property
    def tls_files(self) -> tuple[str | None, ...]:
        """The files of TLS; None if the settings have none."""
        return self.ca, self.cert, self.key

    def read_times(self) -> dict[str, int]:
        """Return when each file of credentials changed (ns), 0 if it cannot be read for now."""
        files = (self.etcd_password_file, *self.tls_files, *self.changed_at)
        return {file: _changed_at(file) for file in files if file is not None}


def _changed_at(file: str) -> int:
    try:
        return call_in_time(file, partial(os.stat, file)).st_ctime_ns
    except OSError:
        return 0


def etcd_tls_context(options: JoinOptions) -> ssl.SSLContext:
    """Return the TLS context for etcd, by default with the system's CAs."""
    context = client_tls(cafile=options.ca or None)
    if options.cert:
        context.load_cert_chain(options.cert, options.key)
    return context


class JoinCredentials:
    """The credentials of a running publisher."""

    def __init__(self, options: JoinOptions) -> None:
        self._options = options
        self._weaknesses = Weaknesses()
        self._weaknesses.replace(options.weaknesses)
        self._refusal = ""
        self._attempt: tuple[float, dict[str, int]] = (-math.inf, {})
        """When changed files were last read, and their times then."""

    async def log_daily(self) -> None:
        """Log weak credentials once a day, forever."""
        await self._weaknesses.log_daily()

    async def run(
        self, hangup: asyncio.Event, etcd: EtcdClient, may_be_refused: Callable[[], bool]
    ) -> None:
        """Read the credentials again after each hangup, and changed files while they are refused.

        It is not part of a call of etcd, because it takes longer than that.
        """
        while True:
            is_asked = await wait_event(hangup, LOOK_S)
            hangup.clear()
            if is_asked:
                self._refusal = ""
            elif not (may_be_refused() and await self._have_changed()):
                continue
            await self._reload(etcd)
            if is_asked and not self._refusal:
                log.info("publisher.reloaded")

    async def _have_changed(self) -> bool:
        """Return whether files changed since they were in use, and since the last attempt."""
        times = await asyncio.to_thread(self._options.read_times)
        attempted_at, previous = self._attempt
        is_due = times != previous or time.monotonic() >= attempted_at + RETRY_S
        if times == self._options.changed_at or not is_due:
            return False
        self._attempt = time.monotonic(), times
        return True

    async def _reload(self, etcd: EtcdClient) -> None:
        """Read the settings again; those that are unusable are logged, and stay as they are."""
        config = ["--config", self._options.config] if self._options.config else []
        command = [*python_command(), "-m", "agentd_fleet", "join-options", *config]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
            output, problems = await process.communicate(msgspec.json.encode(self._options))
            if process.returncode:
                raise ValueError(problems.decode(errors="replace").strip())
            options = msgspec.json.decode(output, type=JoinOptions)
            tls = etcd.credentials.tls if "tls" in options.refused else None
            etcd.replace_credentials(options.to_credentials(tls))
        except (OSError, ValueError) as error:
            self._log_refusal(str(error))
            return
        if options.changed_at != self._options.changed_at:
            log.info("credential.replaced")
        if not options.refused or options.weaknesses != self._options.weaknesses:
            self._weaknesses.replace(options.weaknesses)
        self._options = options
        self._log_refusal("\n".join(options.refused.values()))

    def _log_refusal(self, reason: str) -> None:
        """Log why credentials could not be replaced, unless it is the last reason, or empty."""
        if reason and reason != self._refusal:
            log.warning("publisher.reload_refused", reason=reason)
        self._refusal = reason
