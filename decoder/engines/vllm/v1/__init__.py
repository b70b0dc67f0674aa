"""vLLM's V1 model runner, which vLLM has deprecated: what is wrapped around it, and its drafter.

``around`` stands around the runner's methods, ``adapter`` drafts, ``drafter`` reads late and
``reading`` says what, ``sampling`` repairs the sampler. Nothing outside but ``plugin`` knows these.
"""
