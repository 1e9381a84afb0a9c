"""The demo: SmolLM2-135M-Instruct from a PyPI wheel, and the drafter trained for it."""
