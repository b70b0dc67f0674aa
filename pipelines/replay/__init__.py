"""Replay: recorded generations become labelled cache drafts, and any policy can be tried on them.

``messages``, ``tokenise`` and ``traces`` read, ``split`` parts by session, ``states`` replays every
token position (paper, Appendix B), ``engine`` decodes a recording cycle by cycle, ``walks`` tunes
and finds the oracle, ``foresight`` trains, ``study`` puts it together for ``hvd replay``. All
drafts, features, labels and decisions are the decoder's own.
"""
