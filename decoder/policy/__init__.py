"""What a policy is made of and how it decides, shared by worker and learner: survival of a draft by
position, what a step costs, the rate rule, what is expected of a draft.

``pricing`` and ``rule`` are numpy alone; ``loops`` are compiled where there is numba.
"""
