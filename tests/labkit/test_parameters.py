import pytest

from labkit.session.catalogue import declared, resolve
from whywrong.errors import UsageError

CELL = """
heads: int = 12  # [1, 128] number of heads
scale: float = 0.5  # [0, 1] a factor
defect: str = "none"  # {none, blind} what is wrong
quick: bool = False  # skip the slow part
"""


@pytest.fixture
def parameters():
    return declared(CELL)


def test_ranges_choices_and_help_are_read_from_the_comment(parameters):
    assert (parameters["heads"].low, parameters["heads"].high) == (1.0, 128.0)
    assert parameters["heads"].help == "number of heads"
    assert parameters["defect"].choices == ("none", "blind")
    assert parameters["quick"].help == "skip the slow part"


def test_defaults_are_filled_in(parameters):
    values = resolve("nb", parameters, {"heads": 3})
    assert values == {"heads": 3, "scale": 0.5, "defect": "none", "quick": False}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("heads", "+7", 7),
        ("scale", "1", 1.0),
        ("scale", "5.e-1", 0.5),
        ("scale", ".5", 0.5),
        ("defect", "blind", "blind"),
        ("quick", "true", True),
    ],
)
def test_text_becomes_the_declared_type(parameters, name, text, value):
    assert resolve("nb", parameters, {name: text}, text=True)[name] == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("head", "3", r"head: nb has none of that name; did you mean heads\?"),
        ("heads", "three", r"heads: expected int in \[1, 128\], got 'three'"),
        ("heads", "0", r"heads: expected int in \[1, 128\], got 0"),
        ("heads", "-1", r"heads: expected int in \[1, 128\], got -1"),
        ("heads", "129", r"heads: expected int in \[1, 128\], got 129"),
        ("heads", "2.5", r"heads: expected int in \[1, 128\], got '2.5'"),
        ("scale", "nan", r"scale: expected float in \[0, 1\], got 'nan'"),
        ("scale", "1e999", r"scale: expected float in \[0, 1\], got inf"),
        ("scale", "1_0e-3", r"scale: expected float in \[0, 1\], got '1_0e-3'"),
        ("heads", "1_2", r"heads: expected int in \[1, 128\], got '1_2'"),
        ("heads", "\uff11\uff12", r"heads: expected int in \[1, 128\], got '\uff11\uff12'"),
        ("heads", " 3", r"heads: expected int in \[1, 128\], got ' 3'"),
        ("heads", "9" * 5000, r"heads: expected int in \[1, 128\], got '9{79}$"),
        ("defect", "no", r"defect: expected one of none, blind, got 'no'"),
        ("quick", "maybe", r"quick: expected true or false, got 'maybe'"),
    ],
)
def test_a_wrong_value_names_parameter_value_and_what_is_right(parameters, name, text, message):
    with pytest.raises(UsageError, match=message):
        resolve("nb", parameters, {name: text}, text=True)


@pytest.mark.parametrize("value", [True, 3.0, "3", None])
def test_a_value_of_another_type_is_refused(parameters, value):
    with pytest.raises(UsageError, match="heads"):
        resolve("nb", parameters, {"heads": value})


@pytest.mark.parametrize("cell", ["heads = 12", "heads: int | None = 12", "heads: int = 3 * 4", "x: list = []"])
def test_only_flat_typed_literals_are_parameters(cell):
    with pytest.raises(UsageError, match="line 1"):
        declared(cell)


def test_a_default_out_of_its_own_range_is_refused():
    with pytest.raises(UsageError, match=r"heads: expected .* got 0"):
        declared("heads: int = 0  # [1, 128] number of heads")


def test_choices_are_of_the_parameters_type():
    (parameter,) = declared("n: int = 4  # {1, 2, 4} streams").values()
    assert parameter.parse("2") == 2
    with pytest.raises(UsageError, match=r"parameter n: expected one of 1, 2, 4.*got 3"):
        parameter.parse("3")


def test_a_secret_is_refused_as_a_parameter_and_not_repeated(parameters):
    token = "hf_" + "aB3" * 12
    for given, text in (({"heads": token}, True), ({"defect": token}, False), ({token: "3", "heads": token}, True)):
        with pytest.raises(UsageError, match="it looks like a secret") as error:
            resolve("nb", parameters, given, text=text)
        assert token not in str(error.value).replace(f"parameter {token}", "")
    assert resolve("nb", declared("words: str = ''"), {"words": "no secret at all"}) == {"words": "no secret at all"}


@pytest.mark.parametrize("cell", ["(" * 9, "x: int = ", "\0", "a: int = 1  # [x, y] words", "a: int = 1  # {1, b}"])
def test_a_cell_that_cannot_be_read_is_one_line(cell):
    with pytest.raises(UsageError, match="parameters cell") as error:
        declared(cell)
    assert "\n" not in str(error.value)
