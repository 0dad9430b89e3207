"""Problems of a configuration, collected so that one refusal lists all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentd.errors import ConfigRefused, Problem


class Problems:
    """The problems that were found so far."""

    def __init__(self) -> None:
        self.collected: list[Problem] = []
        self.passing: list[Problem] = []
        """Those that time can mend: a refusal lists them too, but they are none by themselves."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add the problems of a refused configuration, and continue."""
        try:
            yield
        except ConfigRefused as error:
            self.collected += error.problems

    def raise_if_any(self) -> None:
        """Refuse the configuration if anything was found.

        Raises:
            ConfigRefused: lists everything that was found.
        """
        if self.collected:
            raise ConfigRefused(list(dict.fromkeys((*self.collected, *self.passing))))
