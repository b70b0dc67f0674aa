"""Trouble on purpose: the parts of a stack are killed, starved and fed damage while clients ask,
and what users and topics saw of it is counted. Also the same stack for as long as one likes (soak).
"""
