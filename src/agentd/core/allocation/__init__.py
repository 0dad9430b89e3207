"""Allocation: the choice of devices for one kernel, and the ledger of what is held."""
