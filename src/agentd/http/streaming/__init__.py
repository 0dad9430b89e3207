"""Streaming responses: logs, server-sent events, WebSockets."""
