"""vLLM's V1 model runner, which vLLM has deprecated: its wrappers, adapter and drafter.

``around`` wraps the runner's methods, ``adapter`` drafts, ``drafter`` defers the drafter's prefill,
``prefill_budget`` decides whether to prefill, ``sampling`` patches the sampler. Outside of this
package only ``plugin`` imports these.
"""
