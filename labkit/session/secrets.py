"""Secrets in files and messages: detected by detect-secrets, if it is installed, and never printed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys

from whywrong.errors import UsageError

NOT_SCANNED = "NOT SCANNED FOR SECRETS: expected detect-secrets, got none: pip install detect-secrets"
VALUE = re.compile(
    r"""[\w.-]*(?:key|token|secret|auth|credential|password|login)\w*["']?(?:\s*[:=]\s*|\s+)["']?([\w.+/=-]{16,})""",
    re.I,
)
"""A long word after a name such as api_key. A long word without such a name is taken for a hash."""
KNOWN = re.compile(
    r"(?:\b|(?<=\\[nrt]))(?:(?:hf_|gh[opsu]_|glpat-|sk-|xai-|nvapi-|github_pat_|wandb_v1_|(?<![+/])AIza)(?=[\w-]*[\dA-Z])|(?i:bearer)\s+(?=\S*\d))[\w.~+/=-]{20,}"
)
"""Tokens of known forms: Hugging Face's, OpenAI's and others', and the word after Bearer; also after an escape."""
NOTHING = re.compile(r"""[:=]\s*["']?(?:none|null|true|false|no|unset|~)["']?\s*(?=[,}\]#]|$)""", re.I)
"""An empty value."""

VARIABLE = re.compile(r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(?:_|$)", re.I)
"""The name of an environment variable that holds a secret."""


def hidden(text: str) -> str:
    """The text without tokens of a known form, and without the values of environment variables that hold secrets."""
    for name, value in os.environ.items():
        if VARIABLE.search(name) and len(value) >= 8:
            for form in (*(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False)), value):
                text = text.replace(form, f"<{name}>")
    return KNOWN.sub("<secret>", text)


def is_secret(text: str) -> bool:
    """Whether a line holds a secret; with detect-secrets more kinds are detected."""
    return bool(KNOWN.search(text)) or bool(importlib.util.find_spec("detect_secrets") and secrets(text))


def secrets(text: str) -> list[tuple[int, str]] | None:
    """Line number and kind of each secret in a text; without detect-secrets None, and a warning on stderr."""
    try:
        from detect_secrets.core.scan import scan_line
        from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString, HexHighEntropyString
        from detect_secrets.settings import default_settings
    except ImportError:
        print(NOT_SCANNED, file=sys.stderr)
        return None
    places: list[tuple[int, str]] = []
    random = (HexHighEntropyString(limit=3.0), Base64HighEntropyString(limit=4.0))
    with default_settings():
        for number, original in enumerate(text.splitlines(), 1):
            line = NOTHING.sub(" ", original)
            forms = line, re.sub(r"""([:=]\s*)([^\s"'#,{}]+)""", r'\1"\2"', line)  # YAML has no quotes
            kinds = {secret.type for form in forms for secret in scan_line(form) if "Entropy" not in secret.type}
            for word in VALUE.finditer(line):
                if re.search(r"\d", word[1]):
                    kinds |= {p.secret_type for p in random if p.analyze_line("", f'"{word[1]}"', number)}
            kinds |= {"Access Token"} if KNOWN.search(line) else set()
            places += [(number, kind) for kind in sorted(kinds)]
    return places


def refuse_secrets(name: str, text: str) -> None:
    """Raise UsageError, which has line numbers and kinds alone, if a text holds a secret."""
    if places := secrets(text):
        listed = "; ".join(f"line {number}: {kind}" for number, kind in places)
        raise UsageError(f"{name}: holds what looks like a secret ({listed}); expected it out of the file, and revoked")
