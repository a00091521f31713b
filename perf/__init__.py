"""Benches, the byte counter, models and figures; run from a clone, not installed."""
