"""The commands `agentd` and `agentctl`."""
