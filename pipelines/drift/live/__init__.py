"""Scenarios played live: requests to a running stack, whose worker compares policies by turns.

Broker, registry, vLLM and the learner are those of ``hvd up``, on the embedded model. The policy in
force learns; the first policy, frozen, and plain decoding take their turns in blocks of steps
(``decoder.trial``), so all of them meet the same requests on the same machine in the same minute.
"""
