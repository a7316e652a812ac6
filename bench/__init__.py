"""Measurements: run all with ``make bench``, or one with ``python -m bench.steps``."""
