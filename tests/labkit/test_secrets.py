import json
import secrets as random
import string
import sys

import pytest

from labkit.session.secrets import NOT_SCANNED, hidden, refuse_secrets, secrets
from whywrong.errors import UsageError


def test_a_secret_is_told_by_its_line_and_kind_and_never_printed():
    pytest.importorskip("detect_secrets")
    key = random.token_hex(20)
    with pytest.raises(UsageError, match=r"report: holds what looks like a secret \(line 2: ") as error:
        refuse_secrets("report", f"all is well\n'WANDB_API_KEY': '{key}'\n")
    assert key not in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        "use hf_{word}",
        "sk-proj-{word}",
        "Authorization: Bearer {word}",
        "# export WANDB_API_KEY {hexes}",
        "wandb login {hexes}",
        "machine api.wandb.ai login user password {hexes}",
        "password: {hexes}, api_key: none",
        "github_pat_{word}",
    ],
)
def test_a_token_is_found_however_it_is_handed_over(line):
    pytest.importorskip("detect_secrets")
    word = "".join(random.choice(string.ascii_letters + string.digits) for _ in range(36)) + "7"
    assert secrets(line.format(word=word, hexes=random.token_hex(20)))


def test_hashes_paths_and_redacted_keys_are_no_secrets():
    pytest.importorskip("detect_secrets")
    digest = random.token_hex(20)
    for line in (
        f'"commit": "{digest}"',
        "folder: /data/tokens/fineweb_edu_10bt",
        "'WANDB_API_KEY': '<redacted>'",
        "# secret: none",
        "wandb: {api_key: null, secret: none}",
        "token_ids: blocks.0.attention_norm",
        "the key blocks.11.attention_norm.weight is missing",
    ):
        assert secrets(line) == []


def test_without_the_scanner_there_is_one_loud_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "detect_secrets.core.scan", None)
    refuse_secrets("x", f"api_key: '{random.token_hex(20)}'")
    assert capsys.readouterr().err.strip() == NOT_SCANNED


def test_what_is_hidden_in_json_leaves_it_json(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "wörtlich\\")
    texts = [["wörtlich\\"], "a\nhf_" + "aB3" * 12]
    for ascii_only in (True, False):
        assert json.loads(hidden(json.dumps(texts, ensure_ascii=ascii_only))) == [["<MY_API_KEY>"], "a\n<secret>"]
