"""Manifold-constrained hyper-connections (mHC): forward, backward, and what was wrong with one scalar gradient."""
