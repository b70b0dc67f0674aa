"""Policy evaluation, shared by worker and learner: survival curves, cost model, rate rule and
expected accepted length.

``pricing`` and ``rule`` need only numpy; numba compiles ``loops`` where it is installed.
"""
