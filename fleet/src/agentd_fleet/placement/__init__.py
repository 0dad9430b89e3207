"""Placement: the choice of a node for a kernel, and the routes that result."""
