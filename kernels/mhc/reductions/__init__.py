"""The sum of a b over millions of products, five ways: what order can do to it, and what a fixed order costs."""
