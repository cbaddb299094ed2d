import json
import re
import secrets as random
import string

import pytest

from labkit.session.catalogue import ROOT
from labkit.session.secrets import hidden, hidden_json, refuse_secrets, secrets
from whywrong.errors import UsageError


def test_a_secret_is_told_by_its_line_and_kind_and_never_printed():
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
    word = "".join(random.choice(string.ascii_letters + string.digits) for _ in range(36)) + "7"
    assert secrets(line.format(word=word, hexes=random.token_hex(20)))


def test_hashes_paths_and_redacted_keys_are_no_secrets():
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


def word(count, letters=string.ascii_letters + string.digits):
    return "1" + "".join(random.choice(letters) for _ in range(count - 1))


LOWER, UPPER = string.ascii_lowercase + string.digits, string.ascii_uppercase + string.digits
VALUES = [
    "MY_TOKEN",
    "API_KEY",
    "SECRET",
    "MYSQL_PWD",
    "GITHUB_PAT",
    "FTP_PASS",
    "PGPASSWORD",
    "REDIS_PASSWD",
    "APIKEY",
]
VALUES += ["GPG_PASSPHRASE", "AWS_SECRET_ACCESS_KEY", "NPM_CONFIG__AUTH", "SENTRY_DSN", "ACCESSTOKEN", "X_CREDENTIALS"]
"""Variables whose whole value is a secret."""
ADDRESSES = ["DATABASE_URL", "HTTPS_PROXY", "http_proxy", "REDIS_URL", "PIP_INDEX_URL", "AMQP_URL", "MONGO_URI"]
"""Variables that hold an address with a password."""
FORMS = {
    "Hugging Face": lambda: f"hf_{word(34)}",
    "GitHub": lambda: f"ghp_{word(36)}",
    "GitHub, app": lambda: f"ghs_{word(36)}",
    "GitHub, refresh": lambda: f"ghr_{word(36)}",
    "GitHub, fine": lambda: f"github_pat_{word(40)}",
    "GitLab": lambda: f"glpat-{word(20)}",
    "GitLab, deploy": lambda: f"gldt-{word(20)}",
    "GitLab, runner": lambda: f"GR1348941{word(20)}",
    "OpenAI": lambda: f"sk-{word(20)}T3BlbkFJ{word(20)}",
    "OpenAI, project": lambda: f"sk-proj-{word(40)}",
    "xAI": lambda: f"xai-{word(40)}",
    "NVIDIA": lambda: f"nvapi-{word(40)}",
    "Google": lambda: f"AIza{word(35)}",
    "AWS": lambda: f"AKIA{word(16, UPPER)}",
    "AWS, session": lambda: f"ASIA{word(16, UPPER)}",
    "AWS, secret": lambda: f"aws_secret_key = '{word(40)}'",
    "Azure": lambda: f"AccountKey={word(86)}==",
    "Artifactory": lambda: f" AKC{word(12)} ",
    "Discord": lambda: f"M{word(23)}.{word(6)}.{word(27)}",
    "JSON web": lambda: f"eyJ{word(20)}.eyJ{word(20)}.{word(20)}",
    "Mailchimp": lambda: f"{word(32, LOWER)}-us12",
    "npm": lambda: f"//registry/:_authToken=npm_{word(36)}",
    "PyPI": lambda: f"pypi-AgEIcHlwaS5vcmc{word(80)}",
    "SendGrid": lambda: f"SG.{word(22)}.{word(43)}",
    "Slack": lambda: f"xoxb-{word(12, string.digits)}-{word(24, LOWER)}",
    "Slack, hook": lambda: f"https://hooks.slack.com/services/T{word(8)}/B{word(8)}/{word(24)}",
    "Square": lambda: f"sq0csp-{word(43)}",
    "Stripe": lambda: f"sk_live_{word(24)}",
    "Telegram": lambda: f"{word(9, string.digits)}:{word(35)}",
    "Twilio": lambda: f"SK{word(32, LOWER)}",
    "Weights & Biases": lambda: f"wandb_v1_{word(40)}",
    "Bearer": lambda: f"Authorization: Bearer {word(24)}",
    "assigned": lambda: f"password: {word(10)}",
    "assigned, in quotes": lambda: f"{{'MYSQL_PWD': '{word(10)}'}}",
    "exported": lambda: f"export GITHUB_PAT={word(10)}",
    "address": lambda: f"postgres://bob:{word(10)}!$x@db/x",
    "address, no user": lambda: f"redis://:{word(10)}@db",
    "RSA key": lambda: f"-----BEGIN RSA PRIVATE KEY-----\n{word(64)}\n{word(60)}+/==\n-----END RSA PRIVATE KEY-----",
    "encrypted key": lambda: (
        f"-----BEGIN PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\n{word(64)}\n-----END PRIVATE KEY-----"
    ),
    "OpenSSH key": lambda: f"-----BEGIN OPENSSH PRIVATE KEY-----\n{word(70)}\n-----END OPENSSH PRIVATE KEY-----",
    "OpenPGP key": lambda: f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{word(64)}\n-----END PGP PRIVATE KEY BLOCK-----",
    "PuTTY key": lambda: f"PuTTY-User-Key-File-2: ssh-rsa\nPrivate-Lines: 1\n{word(64)}\n",
}
"""Secrets that are known by their form."""


def leaks(text, secret):
    """The pieces of a secret, of six letters with a 1, that are still in a text."""
    pieces = (piece for piece in re.findall(r"[A-Za-z0-9]{6,}", secret) if re.search(r"1\w", piece))
    return [piece for piece in pieces if piece in text]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_secret_of_a_known_form_is_hidden_and_the_text_around_it_is_not(form):
    secret = form()
    text = hidden(f"before it\n{secret}\n(after it)")
    assert text.startswith("before it")
    assert text.endswith("(after it)")
    assert leaks(secret, secret)
    assert not leaks(text, secret)


@pytest.mark.parametrize("name", [*VALUES, *ADDRESSES])
def test_a_secret_of_the_environment_is_hidden_wherever_it_stands(monkeypatch, name):
    secret = word(12)
    monkeypatch.setenv(name, secret if name in VALUES else f"scheme://user:{secret}@host/x")
    assert hidden(f"it is {secret}, {secret[:6]}") == f"it is <{name}>, {secret[:6]}"


def test_variables_that_hold_no_secret_and_short_values_are_shown(monkeypatch):
    for name in ("PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH_X", "HOSTNAME", "AUTHOR"):
        monkeypatch.setenv(name, f"value-of-{name}")
        assert hidden(f"value-of-{name}") == f"value-of-{name}"
    monkeypatch.setenv("MY_TOKEN", "short")
    assert hidden("a short text") == "a short text"


@pytest.mark.long
def test_the_committed_notebooks_and_records_hold_nothing_to_hide():
    for path in [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "data" / "results").glob("*.json")]:
        content = json.loads(path.read_text())
        assert hidden_json(content) == content, path


def test_what_is_hidden_in_json_leaves_it_json(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "wörtlich\\")
    texts = [["wörtlich\\"], "a\nhf_" + "aB3" * 12, 7, {"image/png": "wörtlich\\"}]
    assert hidden_json(texts) == [["<MY_API_KEY>"], "a\n<secret>", 7, {"image/png": "wörtlich\\"}]
    texts = texts[:2]
    for ascii_only in (True, False):
        assert json.loads(hidden(json.dumps(texts, ensure_ascii=ascii_only))) == [["<MY_API_KEY>"], "a\n<secret>"]
