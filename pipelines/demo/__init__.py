"""hvd demo: the whole loop in ten minutes."""
