"""Recipes that only some machines need, beside TwinGrad and not in its packages: `python -m contrib.julia`."""
