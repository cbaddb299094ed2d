import math

import pytest

from labkit.session.wording import fields, fill
from whywrong.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value", "wanted"),
    [
        ("{{ x | digits }}", 0.031234, "0.031"),
        ("{{ x | digits(3) }}", 12345.6, "12300"),
        ("{{ x | digits }}", 1.97e44, "over a million"),
        ("{{ x | digits }}", -2e9, "below minus a million"),
        ("{{ x | digits }}", 3.14e-9, "3.1e-09"),
        ("{{ x | digits }}", math.inf, "inf"),
        ("{{ x | count }}", 16384, "16,384"),
        ("{{ x | percent }}", 0.03123, "3.1%"),
        ("{{ x | span }}", [0.25, 0.1], "0.1 to 0.25"),
        ("{{ x | span }}", [0.101, 0.1], "0.1"),
        ("{{ x | listed }}", ["a", "b", "c"], "a, b and c"),
        ("{{ x | listed }}", ["a"], "a"),
        ("{{ x | listed }}", [], "none"),
        ("{% if x %}yes{% else %}no{% endif %}\n   and so on", 1, "yes and so on"),
    ],
)
def test_a_text_is_filled_in(text, value, wanted):
    assert fill("it", text, {"x": value}) == wanted


def test_what_a_text_needs_is_known_before_it_is_filled_in():
    assert fields("{% if a > 1 %}{{ b.c | digits }}{% endif %} {{ d[0] }}") == {"a", "b", "d"}


@pytest.mark.parametrize("text", ["{{ y }}", "{{ x.z }}", "{{ x | digits }}", "{{ x | unheard }}", "{{ x"])
def test_a_text_that_cannot_be_filled_in_is_named(text):
    with pytest.raises(UsageError, match="claim a"):
        fill("claim a", text, {"x": "words"})
