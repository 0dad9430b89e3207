"""Connections: their limits and deadlines, and the turns of callers."""
