"""What ranks of the tests import: once, in the process that they are forked from, as the agent's fork server does."""

from planaria.agent.forkserver import DEFAULT_PRELOAD, preload

assert preload(DEFAULT_PRELOAD) is None
