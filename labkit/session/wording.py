"""Texts with fields, as data/claims has them: Jinja2 templates, filled with what was measured.

Filters beyond Jinja2's own, each the same on every machine:

    {{ 0.0312 | digits(2) }}            0.031; a number beyond a million in words, one below 1e-4 as 3.1e-05
    {{ 16384 | count }}                 16,384
    {{ 0.0312 | percent }}              3.1%
    {{ [0.1, 0.25] | span(2) }}         0.1 to 0.25, or one number where the two read the same
    {{ ["a", "b", "c"] | listed }}      a, b and c; none where there is nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from whywrong.errors import UsageError
from whywrong.tables import digits


def count(value: float) -> str:
    """A whole number with its thousands set apart."""
    return f"{value:,.0f}"


def percent(share: float, significant: int = 2) -> str:
    """A share of one in percent."""
    return f"{digits(100.0 * share, significant)}%"


def span(ends: Sequence[float], significant: int = 2) -> str:
    """From the smallest to the largest of several numbers."""
    low, high = digits(min(ends), significant), digits(max(ends), significant)
    return low if low == high else f"{low} to {high}"


def listed(items: Sequence[Any]) -> str:
    """Several things in words."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or "none"


ENVIRONMENT = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
"""Jinja2 with the filters above, for which a field that is not there is an error."""
ENVIRONMENT.filters |= {function.__name__: function for function in (digits, count, percent, span, listed)}


def fields(text: str) -> set[str]:
    """The names of the fields that a text needs."""
    return jinja2.meta.find_undeclared_variables(ENVIRONMENT.parse(text))


def fill(what: str, text: str, values: Mapping[str, Any]) -> str:
    """The text with its fields filled in. Raises UsageError, which begins with `what`, for one that is missing."""
    try:
        return " ".join(ENVIRONMENT.from_string(text).render(values).split())
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"{what}: its text cannot be filled in: {error}") from None
