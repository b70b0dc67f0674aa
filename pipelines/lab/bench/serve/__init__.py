"""hvd bench serve: real servers against each other, by requests or by sessions of turns."""
