"""hvd bench trouble: what a bad drafter, cache or batch costs, and how soon that is noticed."""
