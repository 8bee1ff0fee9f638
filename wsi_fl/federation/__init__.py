"""Who talks to whom, what travels, and the one loop that runs every method."""
