"""Figures, and a step to look around in."""
