"""Making an EAGLE3 drafter for a target model: conversations, states, training, export.

Resumable steps over one directory. ``compose`` lets the target write and keeps its states as it
does; ``generate`` (through vLLM, into ``generations.jsonl``) and ``written`` make conversations
without states, which ``extract`` adds. All states are ``states/*.safetensors``. ``train`` reads
them and writes a checkpoint and, whenever it is the best so far, the head in the public layout.
"""
