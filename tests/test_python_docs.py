"""The pages that hold Python: their examples run, and python.md names every function."""

import re
from pathlib import Path

import pytest

import axonn_tune

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = "# needs ranks\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "n_not_run", "printed"),
    [
        ("python.md", 2, "no option 'micro_batchs'; did you mean 'micro_batch'"),
        ("extending.md", 0, "data=4"),
    ],
)
def test_the_examples_of_a_page_run_one_after_another(capsys, page, n_not_run, printed):
    blocks = BLOCK.findall((DOCS / page).read_text())
    names = {"__name__": page}
    for block in blocks:
        if not block.startswith(NOT_RUN):
            exec(compile(block, page, "exec"), names)
    assert sum(block.startswith(NOT_RUN) for block in blocks) == n_not_run
    assert printed in capsys.readouterr().out


def test_the_python_page_has_an_example_and_the_documentation_of_every_function():
    text = (DOCS / "python.md").read_text()
    examples = "".join(BLOCK.findall(text))
    for name in set(axonn_tune.__all__) - {"__version__"}:
        assert f".. autofunction:: axonn_tune.{name}\n" in text
        assert f"axonn_tune.{name}(" in examples
