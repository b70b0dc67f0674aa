"""The first policy, ``hvd bootstrap``: made from anybody's recordings.

``make`` learns one policy from some of each set whose licence allows it and scores it with each set
left out. What comes out names no target and no drafter: numbers travel, text does not.
"""
