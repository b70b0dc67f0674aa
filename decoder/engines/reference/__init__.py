"""A readable torch decoding loop, batch 1, that runs every method through the serving router."""
