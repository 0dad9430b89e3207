"""The publisher: one node, reported to its fleet."""
