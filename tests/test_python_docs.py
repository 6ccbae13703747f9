"""The Python page of the documentation: its examples run, and it names every function."""

import re
from pathlib import Path

import axonn_tune

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = "# needs ranks\n"


def test_the_examples_run_one_after_another(capsys):
    blocks = BLOCK.findall(PAGE.read_text())
    names = {}
    for block in blocks:
        if not block.startswith(NOT_RUN):
            exec(compile(block, str(PAGE), "exec"), names)
    assert sum(block.startswith(NOT_RUN) for block in blocks) == 2
    assert "no option 'micro_batchs'; did you mean 'micro_batch'" in capsys.readouterr().out


def test_the_page_has_an_example_and_the_documentation_of_every_function():
    text = PAGE.read_text()
    examples = "".join(BLOCK.findall(text))
    for name in set(axonn_tune.__all__) - {"__version__"}:
        assert f".. autofunction:: axonn_tune.{name}\n" in text
        assert f"axonn_tune.{name}(" in examples
