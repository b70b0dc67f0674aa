"""hvd bench decode: decoding methods against each other on the same prompts."""
