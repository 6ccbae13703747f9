"""Tear clusters down, including those whose owner is gone."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from axonn_tune.emulate.network import PREFIX, namespaces
from axonn_tune.io.operating_system import process_start

# The name of a namespace tells the process that owns it: its id, and when it started.
_OWNED = re.compile(rf"(?P<prefix>{re.escape(PREFIX)}(?P<pid>\d+)-(?P<start>\d+)-\d+-)")
# The script waits until nobody holds the other end of its standard input any more; then it removes
# the namespaces.
_GUARD = """
cat > /dev/null
for name; do
  for pid in $(ip netns pids "$name" 2> /dev/null); do kill -9 "$pid" 2> /dev/null; done
done
for name; do ip netns del "$name" 2> /dev/null; done
exit 0
"""


def guard(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that waits for this one to end; then it removes namespaces.

    It kills what still runs in them. It watches its standard input, which closes with this
    process however that ends, and signals to the processes of the terminal do not reach it.
    """
    return subprocess.Popen(
        ["sh", "-c", _GUARD, "sh", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def clean() -> list[str]:
    """Remove the clusters whose owner is gone; return the prefixes of their namespaces."""
    stale: set[str] = set()
    for name in namespaces():
        match = _OWNED.match(name)
        if match and process_start(int(match["pid"])) != match["start"]:
            stale.add(match["prefix"])
    names = [name for prefix in sorted(stale) for name in namespaces(prefix)]
    guard(names).communicate()
    return sorted(stale)
