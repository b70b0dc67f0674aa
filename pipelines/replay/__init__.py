"""Recordings decoded once more by any rule, in the virtual time of a cost table.

``engine`` drives the decoder's own router on recordings, ``rules`` are those that a policy is
compared with. The demo replays its own answers, the laboratory traces and prompts.
"""
