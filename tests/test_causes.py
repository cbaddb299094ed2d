"""The catalogue of causes has a page for each kind that whywrong can give, and says what its generator makes."""

import ast

import pytest

from labkit.session.catalogue import ROOT
from tools import causes

KINDS = list(causes.CATALOGUE)
MOST_BYTES = 15_000


def texts(node: ast.AST | None) -> set[str]:
    """The texts that an expression may be, without those that it compares."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=body, orelse=otherwise):
            return texts(body) | texts(otherwise)
        case ast.Dict(values=values):
            return set().union(*map(texts, values))
    return set()


def kinds_in(path: str) -> set[str]:
    """Every text that stands where a source of whywrong has a kind."""
    kinds: set[str] = set()
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Mutation" | "Cause"), args=[kind, *_]):
                kinds |= texts(kind)
            case ast.Yield(value=ast.Tuple(elts=[kind, _, _, *_])):
                kinds |= texts(kind)
            case ast.Assign(targets=[ast.Name(id="kind" | "again" | "KIND_OF" | "LEFT_OUT")], value=value):
                kinds |= texts(value)
            case ast.AugAssign(target=ast.Name(id="LEFT_OUT" | "KIND_OF"), value=value):
                kinds |= texts(value)
            case ast.FunctionDef(name="kind_of_number"):
                for inner in ast.walk(node):
                    kinds |= texts(inner.value) if isinstance(inner, ast.Return) else set()
            case ast.keyword(arg="kind", value=value):
                kinds |= texts(value)
    return kinds - {""}


def test_each_kind_that_whywrong_gives_has_a_page_and_each_page_such_a_kind():
    given = kinds_in("whywrong/explaining/mutations.py") | kinds_in("whywrong/explaining/search.py")
    assert {"layout", "eps", "ddof", "race"} <= given, "the sources are not read as they should be"
    assert given == set(KINDS)
    assert {path.stem for path in causes.PAGES.glob("*.md")} == {*KINDS, "README"}
    assert {path.stem for path in causes.PAGES.glob("*.png")} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_what_the_generator_makes(kind):
    path = ROOT / "data" / "causes" / f"{kind}.md"
    assert path.read_text(encoding="utf-8") == causes.page(kind), "run tools/causes.py"
    assert 0 < path.with_suffix(".png").stat().st_size <= MOST_BYTES


def test_the_list_of_kinds_is_what_the_generator_makes():
    assert (causes.PAGES / "README.md").read_text(encoding="utf-8") == causes.contents()


@pytest.mark.parametrize("kind", KINDS)
def test_the_mutation_shows_on_its_own_inputs_and_not_on_those_that_hide_it(kind):
    entry = causes.CATALOGUE[kind]
    assert causes.shows(kind, entry["inputs"])
    for words, inputs in entry["hidden"].items():
        assert not causes.shows(kind, inputs), words
