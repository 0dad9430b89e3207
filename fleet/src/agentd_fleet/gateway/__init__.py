"""The gateway: routes, lists, and calls proxied to nodes."""
