"""A fleet: many nodes behind one API."""
