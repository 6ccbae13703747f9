"""Questions that need many searches: compare, scale, what-if, training runs.

Nothing here touches files.
"""
