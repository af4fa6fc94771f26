"""What ranks of the tests import: once, in the process that they are forked from."""

import planaria.torch  # noqa: F401
