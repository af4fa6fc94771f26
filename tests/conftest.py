"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline per example, and none for making them: a busy machine is no failure. Tests assert no times anywhere.
settings.register_profile("planaria", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("planaria")
