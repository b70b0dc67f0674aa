"""Trouble on purpose: parts of a stack are killed, starved and fed damage while clients ask, and
what users and topics saw of it is judged from outside.
"""
