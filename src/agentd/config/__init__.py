"""Reading `agent.toml`, and changing it without losing the operator's comments."""
