"""The publisher, which reports one node to its fleet."""
