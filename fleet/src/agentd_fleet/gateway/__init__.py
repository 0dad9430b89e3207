"""The gateway: routes, lists, and calls that are passed on to nodes."""
