"""Hypothesis runs the same examples everywhere: a failure on one machine is one on all."""

from hypothesis import HealthCheck, settings

settings.register_profile("deterministic", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("deterministic")
