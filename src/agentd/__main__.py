"""The program `agentd`, also `python -m agentd`."""

import sys

from agentd.program.first_process import leave_first_process
from agentd.program.process import prepare_daemon


def main() -> None:
    """Run a command."""
    if sys.argv[1:2] == ["run"]:
        prepare_daemon()  # the child inherits the handlers, so a signal to process 1 never ends it
        leave_first_process()
    from agentd.cli.agentd.main import agentd

    agentd()


if __name__ == "__main__":
    main()
