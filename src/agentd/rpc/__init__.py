"""The node's HTTP API: routes, request and response models, and problems with stable codes."""
