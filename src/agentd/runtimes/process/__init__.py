"""The process runtime: plain processes, each under a shim."""
