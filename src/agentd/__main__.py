"""The program `agentd`, also `python -m agentd`."""

import sys

from agentd.program.first_process import leave_first_process
from agentd.program.process import prepare_daemon


def main() -> None:
    """Run a command."""
    if sys.argv[1:2] == ["run"]:
        leave_first_process()
        prepare_daemon()
    from agentd.cli.agentd.main import agentd

    agentd()


if __name__ == "__main__":
    main()
