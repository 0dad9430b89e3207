"""Answers that go on: logs, server-sent events, WebSockets."""
