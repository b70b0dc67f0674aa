"""Replay: recorded generations decoded again, by any policy.

``messages`` and ``traces`` read and part by session, ``engine`` drives the decoder's own router on
recordings and finds the oracle, ``training`` makes policies, ``study`` puts it together for ``hvd
replay``. All drafts, features, labels and decisions are the decoder's own.
"""
