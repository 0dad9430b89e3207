"""`python -m agentd_fleet` is `agentd-fleet`."""

from agentd_fleet.cli import agentd_fleet

if __name__ == "__main__":
    agentd_fleet()
