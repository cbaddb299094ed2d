"""What the package offers is all that a user needs to name."""

import dataclasses
import inspect
import typing

import pytest

import whywrong


def returned(function):
    """The classes of whywrong that a function's annotation says that it gives."""
    hint = typing.get_type_hints(function).get("return")
    return [one for one in (hint, *typing.get_args(hint)) if getattr(one, "__module__", "").startswith("whywrong")]


@pytest.mark.parametrize("name", whywrong.__all__)
def test_each_public_name_is_there_and_says_what_it_is(name):
    assert getattr(whywrong, name).__doc__


@pytest.mark.parametrize("name", [n for n in whywrong.__all__ if inspect.isfunction(getattr(whywrong, n))])
def test_what_a_public_function_returns_has_a_public_name(name):
    assert {one.__name__ for one in returned(getattr(whywrong, name))} <= set(whywrong.__all__)


@pytest.mark.parametrize("name", [n for n in whywrong.__all__ if dataclasses.is_dataclass(getattr(whywrong, n))])
def test_what_a_public_dataclass_holds_has_a_public_name(name):
    texts = [str(field.type) for field in dataclasses.fields(getattr(whywrong, name))]
    ours = {word for text in texts for word in ("Finding", "Failure", "Repeated", "Fit", "Elements") if word in text}
    assert ours <= set(whywrong.__all__)


OPTIONS = {"precision", "names", "progress", "elements", "false_alarm", "times", "settings", "bound", "seconds"}


@pytest.mark.parametrize("name", [n for n in whywrong.__all__ if inspect.isfunction(getattr(whywrong, n))])
def test_options_are_keyword_only(name):
    parameters = inspect.signature(getattr(whywrong, name)).parameters.items()
    positional = {n for n, p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)}
    assert not positional & OPTIONS - ({"bound"} if name == "structure" else set())
