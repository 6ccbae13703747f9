"""Check whether a validation keeps the limits that a user sets."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.validation.agreement import Agreement


@dataclass(frozen=True)
class Check:
    """A limit, whether it holds, and one line that says so."""

    name: str
    holds: bool
    text: str


def check_limits(
    agreement: Agreement | None, max_error: float | None, max_regret: float | None
) -> list[Check]:
    """Check the limits that were given, as fractions; none holds where nothing ran."""
    checks = []
    if max_error is not None:
        checks.append(at_most("MAPE", agreement.mape if agreement else None, max_error))
    if max_regret is not None:
        checks.append(at_most("regret", agreement.regret if agreement else None, max_regret))
    return checks


def at_most(name: str, value: float | None, limit: float) -> Check:
    """Check that a fraction is known and does not exceed its limit."""
    if value is None:
        return Check(name, False, f"FAILED  {name} is unknown; allowed: {100 * limit:g} %")
    holds = value <= limit
    verdict, sign = ("passed", "<=") if holds else ("FAILED", ">")
    return Check(name, holds, f"{verdict}  {name} {100 * value:.1f} % {sign} {100 * limit:g} %")
