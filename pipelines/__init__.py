"""Everything a person or a scheduler launches, built from the decoder and the learner.

May import ``decoder`` and ``learner``; nothing imports it.
"""
