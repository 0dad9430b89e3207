"""The services: the daemon's logic over Protocols, and all of its mutable state."""
