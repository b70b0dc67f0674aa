"""hvd bench decode: decoding methods on the same prompts, one request at a time."""
