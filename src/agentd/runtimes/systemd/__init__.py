"""The systemd runtime: transient units."""
