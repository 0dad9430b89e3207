"""The composition root: the parts of one daemon, their start, reload and stop."""
