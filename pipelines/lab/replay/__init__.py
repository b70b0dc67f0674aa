"""Replay: recorded generations decoded again, by any policy.

``messages`` and ``traces`` read, ``split`` parts by session, ``engine`` drives the decoder's own
router on recordings, ``hindsight`` finds the oracle, ``training`` makes policies, ``study`` and
``rules`` put it together for ``hvd replay``. All drafts, features, labels and decisions are the
decoder's own.
"""
