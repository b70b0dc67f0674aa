"""Replay: recorded generations decoded again, by any policy.

``traces`` reads and parts by session, ``engine`` drives the decoder's own router on recordings and
finds the oracle, ``study`` makes policies and puts it together for ``hvd replay``. All drafts,
features, labels and decisions are the decoder's own.
"""
