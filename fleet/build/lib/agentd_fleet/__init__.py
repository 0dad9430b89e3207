"""Many nodes as one: what they offer together, and where a request may go."""
