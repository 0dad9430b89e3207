"""`python -m agentd`."""

from agentd.cli import agentd

if __name__ == "__main__":
    agentd()
