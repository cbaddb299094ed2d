"""Scripts that make records, pages and tables. Run from the checkout's root, as ``python -m tools.answers``."""
