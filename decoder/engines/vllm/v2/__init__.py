"""vLLM's V2 model runner: subclasses of its worker, runner, speculators and scheduler.

``runner_choice`` configures them where vLLM has chosen that runner. ``batch`` mirrors the requests
on the host, ``runner`` trims steps to the chosen drafts, ``speculators`` make the next drafts,
``scheduler`` counts the verified ones.
"""
