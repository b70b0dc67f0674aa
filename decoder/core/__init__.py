"""One decoding cycle: what is drafted, chosen, labelled, and what it costs."""
