"""Programs of this folder, which run on their own since each has a process group of its own."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path


@cache
def printed_by(program, *arguments):
    """What a program prints as JSON."""
    path = Path(__file__).with_name(program)
    done = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
