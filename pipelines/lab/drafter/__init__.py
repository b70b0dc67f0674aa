"""Making an EAGLE3 drafter: conversations with the target's states, training, export.

Resumable steps over one folder: ``compose`` fills ``states``; ``train`` reads them, keeps a
checkpoint and, whenever it is the best, the head.
"""
