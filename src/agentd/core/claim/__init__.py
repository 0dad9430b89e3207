"""Claims: devices that other engines take from the ledger."""
