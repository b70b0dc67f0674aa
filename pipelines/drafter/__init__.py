"""Making an EAGLE3 drafter for a target model: conversations with states, training, export.

Resumable steps over one folder: ``compose`` lets the target write and keeps its states as it does
(``states/*.safetensors``), ``train`` reads them and writes a checkpoint and, when it is the best so
far, the head in the public layout. ``measure`` counts what the stock engine makes of a head.
"""
