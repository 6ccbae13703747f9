"""The prose of docs/validation.md: each heading has its own, no link leads nowhere."""

import re
from pathlib import Path

import pytest

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.report.validation_page import note_name
from axonn_tune.reproduce.reproduction import measured_steps
from axonn_tune.reproduce.runs import Loaders

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "validation.md").read_text()
NOTES = {
    path.stem: path.read_text()
    for path in (ROOT / "axonn_tune" / "reproduce" / "notes").glob("*.md")
}
TITLES = re.findall(r"^##+ (.+)$", PAGE, re.MULTILINE)


def sentences(text):
    """Return the sentences of a text in Markdown; an item of a list begins one, too."""
    parts = re.split(r"\n\n|\n(?=- )", text)
    return [
        sentence for part in parts for sentence in re.split(r"(?<=[.:;?]) ", " ".join(part.split()))
    ]


def test_every_heading_has_a_note_and_no_note_is_left_over():
    beside = {"introduction", "fitted-beside"}
    assert set(NOTES) - beside == {note_name(title) for title in TITLES}


def test_every_table_of_measured_steps_has_a_section():
    loaders = Loaders(load_model, load_machine, load_engine)
    assert set(measured_steps(load_published, loaders)) <= set(TITLES)


def test_links_inside_the_page_lead_to_a_heading():
    # GitHub and Sphinx drop what is no letter, digit, space or hyphen.
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in TITLES}
    links = set(re.findall(r"\]\(#([^)]+)\)", PAGE))
    assert len(links) > 30
    assert links <= anchors


@pytest.mark.parametrize("name", sorted(NOTES))
def test_no_sentence_is_too_long_to_read(name):
    assert [s for s in sentences(NOTES[name]) if len(s.split()) > 35] == []


def test_systems_and_steps_say_what_was_fitted():
    of_tables = PAGE.split("\n## Measured steps")[1].split("\n## Memory of")[0]
    of_systems = PAGE.split("\n## End results")[1].split("\n## Bandwidth of rings")[0]
    sections = [*of_tables.split("\n### ")[1:], *of_systems.split("\n### ")[1:]]
    assert len(sections) == 32
    assert [s.splitlines()[0] for s in sections if "\n- **Fitted.** " not in s] == []
