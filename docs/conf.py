"""How Sphinx builds the documentation: ``sphinx-build -W docs build/docs``."""

from axonn_tune import __version__

project = "axonn-tune"
author = "the authors of axonn-tune"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["build", "emulated", "examples"]
html_theme = "furo"
html_title = f"axonn-tune {release}"
# The site asks nothing of other hosts.
html_use_opensearch = ""
