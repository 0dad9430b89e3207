"""The service parts that daemon and gateway share; imports nothing of a node."""
