"""The first policy: made from anybody's recordings, checked on texts it has not seen.

``sets`` reads recordings whose licence allows it, ``make`` learns one policy from some of each and
scores it with each set left out, ``check`` compares it with a policy refitted to the text at hand
and with counting, ``command`` is ``hvd bootstrap``. What comes out names no target and no drafter:
numbers travel, text does not.
"""
