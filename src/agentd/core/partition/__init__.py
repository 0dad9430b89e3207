"""Partition: the division of physical devices among the agents of a node."""
