"""Making an EAGLE3 drafter for a target model: conversations with states, training, export.

Resumable steps over one directory. ``compose`` lets the target write and keeps its states as it
does, ``written`` lets it read what others wrote; all states are ``states/*.safetensors``. ``train``
reads them and writes a checkpoint and, whenever it is the best so far, the head in the public
layout.
"""
