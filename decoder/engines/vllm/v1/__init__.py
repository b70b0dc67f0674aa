"""vLLM's V1 model runner, which vLLM has deprecated.

``runner`` wraps its methods, ``drafter`` defers the drafter's prefill, ``coverage`` tracks which
requests and blocks have it, ``sampling`` patches the sampler. Outside of this package only
``plugin`` imports these.
"""
