"""``hvd bootstrap``: trains the first policy from recorded generations.

``make`` trains one policy on a sample of each set whose licence allows it, and scores it with each
set left out. The result names no target and no drafter, and contains no text.
"""
