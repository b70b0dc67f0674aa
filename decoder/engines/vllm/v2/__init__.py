"""vLLM's V2 model runner: subclasses of its worker, runner, speculators and scheduler.

``configured`` chooses them where vLLM has chosen that runner. ``batch`` keeps on the host what the
adapter asks a runner of the V1 kind, ``runner`` trims steps to the drafts that were chosen and
chooses the next ones, ``speculators`` make them, ``scheduler`` counts them.
"""
