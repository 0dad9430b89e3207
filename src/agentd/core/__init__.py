"""The decisions of agentd, as arithmetic over values.

Nothing here waits, reads a clock, draws a random number, logs or touches the
world. A decision is returned; whoever owns the state applies it.
"""
