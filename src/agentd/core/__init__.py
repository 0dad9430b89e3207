"""The decisions of agentd as pure functions of values.

Nothing here waits, reads a clock, draws a random number, logs or touches the host. A decision is
returned; the owner of the state applies it.
"""
