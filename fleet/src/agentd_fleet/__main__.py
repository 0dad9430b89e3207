"""The program `agentd-fleet`, also `python -m agentd_fleet`."""

import sys

from agentd.program.process import prepare_daemon


def main() -> None:
    """Run a command."""
    if sys.argv[1:2] == ["gateway"]:
        prepare_daemon()
    from agentd_fleet.cli import agentd_fleet

    agentd_fleet()


if __name__ == "__main__":
    main()
