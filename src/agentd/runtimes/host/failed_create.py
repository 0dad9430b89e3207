"""The end of a create that failed on the host itself, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

from agentd.errors import AgentdError, OutcomeUnknown, public_reason
from agentd.os_errors import os_error_as_refusal
from agentd.services.protocols import CreateUndone


async def undo_create(removal: Awaitable[object], error: BaseException, bundle: Path) -> None:
    """Remove the remains of a create; returns if its own error is the one to raise.

    Raises:
        OutcomeUnknown: they cannot be removed.
        CreateUndone: it was cancelled.
        AgentdError: the host failed it.
    """
    try:
        await removal
    except AgentdError as cleanup_error:
        reason = f"{public_reason(error)}; cleanup failed: {public_reason(cleanup_error)}"
        raise OutcomeUnknown(reason) from error
    if isinstance(error, OSError):
        raise os_error_as_refusal(error, str(bundle)) from error
    if isinstance(error, asyncio.CancelledError):
        raise CreateUndone from error
