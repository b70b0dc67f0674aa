"""What a running service says of itself on its topics, kept for whoever looks."""
