"""Connections: admission, deadlines, fair turns and WebSockets."""
