"""vLLM's V2 model runner: subclasses of its worker, runner, speculators and scheduler.

``configured``, outside, names them where vLLM has chosen that runner. ``batch`` keeps on the host
what the adapter asks a runner of the V1 kind, ``runner`` cuts steps to the drafts that were chosen,
``speculators`` make the next ones, ``scheduler`` counts them.
"""
