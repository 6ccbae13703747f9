"""The list of mutants that change nothing is about the code as it is."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MUTANTS = yaml.safe_load((ROOT / "tests" / "equivalent_mutants.yaml").read_text())


def without_spaces(text):
    return "".join(text.split())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["before"])
def test_the_line_that_a_mutant_changes_is_in_its_file(mutant):
    source = (ROOT / mutant["path"]).read_text()
    assert without_spaces(mutant["before"]) in without_spaces(source)
