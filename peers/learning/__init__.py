"""How a trainer learns from groups of rollouts.

    advantages.py   rewards of a group -> how much better each completion is than its siblings
    losses.py       log-probabilities and advantages -> one number to minimise
    learner.py      groups -> one optimizer step on the LoRA adapter, and state that survives a restart

The manifest's `learning.loss` names an entry of `ADVANTAGES` and of `LOSSES`.
"""
