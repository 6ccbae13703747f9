"""Fixtures that tests of files share."""

from pathlib import Path

import pytest


@pytest.fixture
def no_user_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let no files but those of the package be found by name."""
    monkeypatch.delenv("AXONN_TUNE_PATH", raising=False)
    monkeypatch.chdir(tmp_path)
