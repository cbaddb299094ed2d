"""JSON and YAML files, checked by the schemas beside this module: result, notebook and claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from whywrong.errors import UsageError


def read_json(path: Path, name: str, schema: str = "") -> Any:
    """The content of a JSON file. Raises UsageError, which begins with `name`, for an invalid one."""
    return _read(path, name, json.loads, "JSON", schema)


def read_yaml(path: Path, name: str, schema: str = "") -> Any:
    """The content of a YAML file. Raises UsageError as :func:`read_json` does."""
    import yaml

    return _read(path, name, yaml.safe_load, "YAML", schema, yaml.YAMLError)


def _read(
    path: Path,
    name: str,
    parse: Callable[[str], Any],
    format: str,
    schema: str,
    error_type: type[Exception] = ValueError,
) -> Any:
    try:
        content = parse(path.read_text(encoding="utf-8"))
        return validate(content, schema) if schema else content
    except (OSError, ValueError, RecursionError, error_type) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error)[:160].split())
        expected = f"{format} of a {schema}".removesuffix(" of a ")
        raise UsageError(f"{name}: {path} cannot be read ({why}); expected {expected}") from None


def validate(content: Any, schema: str) -> Any:
    """Return `content`. Raises ValueError where it does not match <schema>.schema.json."""
    return _validator(schema)(content)


@cache
def _validator(schema: str) -> Callable[[Any], Any]:
    import fastjsonschema

    path = Path(__file__).with_name(f"{schema}.schema.json")
    return fastjsonschema.compile(json.loads(path.read_text(encoding="utf-8")))
