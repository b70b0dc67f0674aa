"""Training rows, losses, and the networks trained on them."""
