"""Secrets in what is written or shared: found by detect-secrets, an extra, and never printed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys

from whywrong.errors import UsageError

NOT_SCANNED = "NOT SCANNED FOR SECRETS: detect-secrets is not installed; expected it: pip install -e '.[lm]'"
VALUE = re.compile(
    r"""[\w.-]*(?:key|token|secret|auth|credential|password|login)\w*["']?(?:\s*[:=]\s*|\s+)["']?([\w.+/=-]{16,})""",
    re.I,
)
"""A long word behind a name that calls it a secret. Without the name it is a hash, and those are everywhere."""
KNOWN = re.compile(
    r"(?:\b|(?<=\\[nrt]))(?:(?:hf_|gh[opsu]_|glpat-|sk-|xai-|nvapi-|github_pat_|wandb_v1_|(?<![+/])AIza)(?=[\w-]*[\dA-Z])|(?i:bearer)\s+(?=\S*\d))[\w.~+/=-]{20,}"
)
"""Tokens by their form: Hugging Face's, OpenAI's and others', and what stands behind Bearer; also after an escape."""
NOTHING = re.compile(r"""[:=]\s*["']?(?:none|null|true|false|no|unset|~)["']?\s*(?=[,}\]#]|$)""", re.I)
"""A value that says that there is none."""

VARIABLE = re.compile(r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(?:_|$)", re.I)
"""The name of an environment variable that holds a secret."""


def hidden(text: str) -> str:
    """The text without tokens of a known form, and without what the environment's variables of such names hold."""
    for name, value in os.environ.items():
        if VARIABLE.search(name) and len(value) >= 8:
            for written in (*(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False)), value):
                text = text.replace(written, f"<{name}>")
    return KNOWN.sub("<secret>", text)


def is_secret(text: str) -> bool:
    """Whether a line holds a secret, as far as can be seen; detect-secrets sees further, where it is installed."""
    return bool(KNOWN.search(text)) or bool(importlib.util.find_spec("detect_secrets") and secrets(text))


def secrets(text: str) -> list[tuple[int, str]] | None:
    """Line, from 1, and kind of each secret in a text; None without detect-secrets, which is said on stderr."""
    try:
        from detect_secrets.core.scan import scan_line
        from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString, HexHighEntropyString
        from detect_secrets.settings import default_settings
    except ImportError:
        print(NOT_SCANNED, file=sys.stderr)
        return None
    found: list[tuple[int, str]] = []
    random = (HexHighEntropyString(limit=3.0), Base64HighEntropyString(limit=4.0))
    with default_settings():
        for number, whole in enumerate(text.splitlines(), 1):
            line = NOTHING.sub(" ", whole)
            forms = line, re.sub(r"""([:=]\s*)([^\s"'#,{}]+)""", r'\1"\2"', line)  # YAML has no quotes
            kinds = {one.type for form in forms for one in scan_line(form) if "Entropy" not in one.type}  # every word
            for word in VALUE.finditer(line):
                if re.search(r"\d", word[1]):
                    kinds |= {p.secret_type for p in random if p.analyze_line("", f'"{word[1]}"', number)}
            kinds |= {"Access Token"} if KNOWN.search(line) else set()
            found += [(number, kind) for kind in sorted(kinds)]
    return found


def refuse_secrets(name: str, text: str) -> None:
    """Raise UsageError, which names lines and kinds alone, where a text holds a secret."""
    if found := secrets(text):
        places = "; ".join(f"line {number}: {kind}" for number, kind in found)
        raise UsageError(f"{name}: holds what looks like a secret ({places}); expected it out of the file, and revoked")
