"""The view: nodes and slot types of the fleet as one value."""
