"""What agentd does, over Protocols alone; all mutable state lives here."""
