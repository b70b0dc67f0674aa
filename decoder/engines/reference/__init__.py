"""A readable torch loop, batch 1, that runs every method through the router that serves."""
