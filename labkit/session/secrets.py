"""Secrets in files and messages: detected by detect-secrets and by their names, and never printed."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from typing import Any

from whywrong.errors import UsageError

VALUE = re.compile(
    r"""(?i)[\w.-]*(?:key|token|secret|auth|credential|password|login)\w*["']?(?:\s*[:=]\s*|\s+)["']?([\w.+/=-]{16,})"""
)
"""A long word after a name such as api_key. A long word without such a name is taken for a hash."""
KNOWN = re.compile(
    r"(?:\b|(?<=\\[nrt]))(?:(?:hf_|gh[opsu]_|glpat-|sk-|xai-|nvapi-|eyJ|github_pat_|wandb_v1_|(?<![+/])AIza)(?=[\w-]*[\dA-Z])|(?i:bearer)\s+(?=\S*\d))[\w.~+/=-]{20,}"
)
"""Tokens of known forms: Hugging Face's, OpenAI's and others', and the word after Bearer; also after an escape."""
NOTHING = re.compile(r"""[:=]\s*["']?(?:none|null|true|false|no|unset|~)["']?\s*(?=[,}\]#]|$)""", re.I)
"""An empty value."""

VARIABLE = re.compile(
    r"PASS(?:W|PH)|SECRET|CREDENTIAL|TOKEN(?!IZER)|KEY$|_PWD$|(?:^|_)(?:KEY|PASS|PAT|AUTH|DSN)(?:_|$)", re.I
)
"""The name of an environment variable that holds a secret."""
URL = re.compile(r"""(?<=://)[^\s/:@'"<>]*:([^\s/@'"<>]+)(?=@)""")
"""User and password in an address."""
_NAME = r"""(?:(?<=[A-Z0-9]_)(?:PWD|PASS|PAT|KEY|AUTH)|(?i:passw(?:or)?d|passphrase|secret|token|api_?key))"""
ASSIGNED = re.compile(_NAME + r"""["']?\s*[:=]\s*["']?(?=[^\s"',;()[\]{}<>]*\d)[^\s"',;()[\]{}<>]{8,}""")
"""A word with a digit that is assigned to a name such as MYSQL_PWD."""
PRIVATE_KEY = re.compile(
    r"(?:-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----|Private-Lines: \d)(?:[\w+/=\s\\:,.]|-(?!----))*"
)


@cache
def _forms() -> list[re.Pattern[str]]:
    """The forms of secrets: this module's, and those of detect-secrets' plugins for tokens."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    plugins: dict[str, Any] = get_mapping_from_secret_type_to_class()
    others = {"Public IP (ipv4)", "Basic Auth Credentials"}
    tokens = (form for kind in plugins.keys() - others for form in getattr(plugins[kind], "denylist", ()))
    return [PRIVATE_KEY, URL, KNOWN, *tokens, ASSIGNED]


def hidden(text: str) -> str:
    """The text without secrets of a known form, and without those that environment variables hold.

    A secret that is encoded, such as in base64, or in pieces is not detected.
    """
    for name, value in os.environ.items():
        for secret in [value] if VARIABLE.search(name) else URL.findall(value):
            for form in (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], secret):
                text = text.replace(form, f"<{name}>") if len(secret) >= 6 else text
    for pattern in _forms():
        text = pattern.sub("<secret>", text)
    return text


def hidden_json(value: Any) -> Any:
    """A JSON value without the secrets of its strings."""
    if isinstance(value, dict):
        return {name: item if name == "image/png" else hidden_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [hidden_json(item) for item in value]
    return hidden(value) if isinstance(value, str) else value


def secrets(text: str) -> list[tuple[int, str]]:
    """Line number and kind of each secret in a text."""
    from detect_secrets.core.scan import scan_line
    from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString, HexHighEntropyString
    from detect_secrets.settings import default_settings

    places: list[tuple[int, str]] = []
    random = (HexHighEntropyString(limit=3.0), Base64HighEntropyString(limit=4.0))
    with default_settings():
        for number, line in enumerate((NOTHING.sub(" ", line) for line in text.splitlines()), 1):
            forms = line, re.sub(r"""([:=]\s*)([^\s"'#,{}]+)""", r'\1"\2"', line)  # YAML has no quotes
            kinds = {secret.type for form in forms for secret in scan_line(form) if "Entropy" not in secret.type}
            words = [f'"{word}"' for word in VALUE.findall(line) if re.search(r"\d", word)]
            kinds |= {plugin.secret_type for plugin in random for word in words if plugin.analyze_line("", word)}
            kinds |= {"Access Token"} if KNOWN.search(line) else set()
            places += [(number, kind) for kind in sorted(kinds)]
    return places


def refuse_secrets(name: str, text: str) -> None:
    """Raise UsageError, which has line numbers and kinds alone, if a text holds a secret."""
    if places := secrets(text):
        listed = "; ".join(f"line {number}: {kind}" for number, kind in places)
        raise UsageError(f"{name}: holds what looks like a secret ({listed}); expected it out of the file, and revoked")
