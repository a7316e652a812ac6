"""Programs that show ampfx at work; run them from the repository, as ``python -m examples.digits``."""
