"""The HTTP side: JSON in, values out, and problems with stable codes."""
