"""What a policy is made of and how it decides, shared by worker and learner.

numpy only: survival of a draft by position, what a step costs, the rate rule, what is expected of a
draft. Workers run the same, compiled, in ``decoder.core.loops``; tests hold the two together.
"""
