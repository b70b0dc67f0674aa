"""What keeps a worker from being slower than without a policy, or than without drafts.

``controller`` overrides a policy's arms and schedules every probe; ``floor`` is the test behind its
fallback; ``draft_budget`` and ``prefill_budget`` limit what a step may verify and read.
"""
