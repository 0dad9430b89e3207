"""Talking to a daemon."""
