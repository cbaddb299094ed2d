"""The systems under investigation, a folder each. They may use labkit; labkit knows none of them."""
