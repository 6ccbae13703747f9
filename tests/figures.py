"""Figures that were written: whether something is drawn on them, and which texts."""

import io
import re
import zlib
from functools import cache
from xml.etree import ElementTree

import numpy as np

from axonn_tune.report.figure import figure_bytes, new_figure


def assert_drawn(path):
    """Assert that a file is a figure in its format with more on it than two empty axes."""
    ending = path.suffix.lstrip(".")
    assert amount_drawn(path.read_bytes(), ending) > 1.5 * amount_of_empty_axes(ending)


@cache
def amount_of_empty_axes(ending):
    figure, _ = new_figure(1, 2)
    return amount_drawn(figure_bytes(figure, f"empty.{ending}"), ending)


def amount_drawn(content, ending):
    """Return the share of colored pixels of a PNG, or the number of paths of an SVG or PDF."""
    return {"png": colored_share, "svg": paths_of_svg, "pdf": paths_of_pdf}[ending](content)


def colored_share(content):
    from matplotlib.image import imread

    pixels = imread(io.BytesIO(content), format="png")[..., :3]
    return float(np.mean((pixels < 0.99).any(axis=-1)))


def paths_of_svg(content):
    root = ElementTree.fromstring(content)
    return sum(element.tag.endswith(("}path", "}use")) for element in root.iter())


def paths_of_pdf(content):
    assert content.startswith(b"%PDF") and content.rstrip().endswith(b"%%EOF")
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", content, re.DOTALL)
    return sum(len(re.findall(rb" m$", inflated(stream), re.MULTILINE)) for stream in streams)


def inflated(stream):
    try:
        return zlib.decompress(stream)
    except zlib.error:
        return stream


def svg_texts(path):
    """Return the texts of an SVG, which matplotlib draws as paths under a comment each."""
    return re.findall(r"<!-- (.+?) -->", path.read_text())
