"""Tear clusters down, also those whose owner is gone."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from axonn_tune.emulate.network import PREFIX, namespaces
from axonn_tune.io.operating_system import process_start

_OWNED = re.compile(rf"({re.escape(PREFIX)}(\d+)-(\d+)-\d+-)")
# Ends when nobody holds the other end of its standard input any more; then removes everything.
_GUARD = """
cat > /dev/null
for name; do
  for pid in $(ip netns pids "$name" 2> /dev/null); do kill -9 "$pid" 2> /dev/null; done
done
for name; do ip netns del "$name" 2> /dev/null; done
exit 0
"""


def guard(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that removes namespaces, and ends what runs in them, once this one has ended.

    It goes by its standard input, which closes with this process however that ends, and a
    signal to the terminal's processes does not reach it.
    """
    return subprocess.Popen(
        ["sh", "-c", _GUARD, "sh", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def tear_down(names: Sequence[str]) -> None:
    """Remove namespaces and end what runs in them."""
    guard(names).communicate()


def clean() -> list[str]:
    """Remove the clusters whose owner is gone; their names' beginnings."""
    owned = {match.group(1): match for name in namespaces() if (match := _OWNED.match(name))}
    stale = [p for p, match in owned.items() if process_start(int(match[2])) != match[3]]
    tear_down([name for prefix in stale for name in namespaces(prefix)])
    return stale
