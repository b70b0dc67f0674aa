"""Training rows, losses, and the networks that are trained on them."""
