"""XLA's threads are pinned for all of these tests, before any makes an array."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("NPROC", "1")
pytest.importorskip("jax", reason="needs planaria[jax]")

import jax

jax.config.update("jax_num_cpu_devices", 4)
