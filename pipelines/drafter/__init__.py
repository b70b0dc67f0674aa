"""Making an EAGLE3 drafter for a target model: generate, extract, train, export.

Three resumable steps over one directory: ``generations.jsonl`` (the target's own answers),
``states/*.safetensors`` (its hidden states over them), ``head/`` (the checkpoint, public layout).
"""
