"""The parts of the report page, which lie in the package as files."""

from __future__ import annotations

from pathlib import Path

from axonn_tune.io.yaml_files import read_text

_FOLDER = Path(__file__).resolve().parent.parent / "report" / "web"
# In the order in which a page loads them.
_VENDOR = ("d3.min.js", "plot.umd.min.js")


def page_parts() -> dict[str, str]:
    """Template, styles, script and the plotting library, by their names in the template."""
    vendor = "\n".join(read_text(_FOLDER / "vendor" / name) for name in _VENDOR)
    return {
        "template": read_text(_FOLDER / "page.html"),
        "styles": read_text(_FOLDER / "page.css"),
        "script": read_text(_FOLDER / "page.js"),
        "vendor": vendor,
    }
