"""The JAX front: pytrees in and out.

import planaria.jax as pj

job = pj.init(shards=8)
for step in job.steps(10_000, state, update):
    for shard in step.shards():
        step.grad(grad, load(step.index, shard))
    print(step.index, step.metrics["loss"])
"""

from planaria.core.messages import Policy
from planaria.errors import JobLostError, NonFiniteError, PlanariaError, UsageError
from planaria.jax.job import Job, init
from planaria.jax.step import Step

__all__ = ["Job", "JobLostError", "NonFiniteError", "PlanariaError", "Policy", "Step", "UsageError", "init"]
