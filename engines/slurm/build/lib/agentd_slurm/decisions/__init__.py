"""Decisions as functions of values: facts in, actions out."""
