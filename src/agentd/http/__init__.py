"""The HTTP server that the node and the fleet's gateway share."""
