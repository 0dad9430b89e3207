"""The HTTP parts that the node and the fleet's gateway share."""
