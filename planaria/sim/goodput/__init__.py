"""What failures cost a training run, and what each way to live with them keeps: ``planaria plan``.

A seeded simulation that jumps from event to event (a failure, a machine repaired, a group back), because between two
events a job's speed is constant. Where the answer hangs on a decision of ours it asks the code that decides in a run:
``core.assignment`` for who computes a lost group's shards, ``core.plan`` for back-off and budget, ``core.liveness`` for
how long a silence may last.
"""
