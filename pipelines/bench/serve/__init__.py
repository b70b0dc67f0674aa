"""hvd bench serve: real servers against each other under load."""
