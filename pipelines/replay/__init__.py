"""Replay: recorded generations decoded again, by any policy.

``messages``, ``tokenise`` and ``traces`` read, ``split`` parts by session, ``engine`` drives the
decoder's own router on recordings, ``hindsight`` walks through them by rules that look at the draft
alone and finds the oracle, ``training`` makes policies, ``study`` and ``rules`` put it together for
``hvd replay``. All drafts, features, labels and decisions are the decoder's own.
"""
