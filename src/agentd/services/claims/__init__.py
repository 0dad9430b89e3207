"""Claims of the node: creating, renewing and ending them."""
