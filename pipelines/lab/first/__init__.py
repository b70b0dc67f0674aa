"""The first policy: made from anybody's recordings, checked on texts it has not seen.

``make`` learns one policy from some of each set whose licence allows it and scores it with each set
left out, ``check`` compares it with a policy refitted to the text at hand and with counting,
``cli`` is ``hvd bootstrap``. What comes out names no target and no drafter: numbers
travel, text does not.
"""
