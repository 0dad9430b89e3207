"""The outside world, one thing in each module; none knows another."""
