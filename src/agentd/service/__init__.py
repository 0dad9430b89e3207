"""What a daemon and a gateway share as services of systemd; imports nothing of a node."""
