"""Questions that need many searches: compare, scale, what-if, training runs. Pure."""
