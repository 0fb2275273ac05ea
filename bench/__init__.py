"""Measurements against peers and limits; ``python -m bench`` runs them all. Nothing here is installed with the packages."""
