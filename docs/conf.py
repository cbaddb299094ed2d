"""Sphinx's settings of the site: `make docs`, from the whole checkout, so that links between files hold as they are.

Notebooks are shown as they are committed, and nothing is fetched.
"""

import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"]
author = PROJECT["authors"][0]["name"]
copyright = author
release = PROJECT["version"]

root_doc = "docs/index"
include_patterns = [f"{folder}*.md" for folder in ("", "docs/", "benchmark/", "data/*/", "kernels/*/")]
include_patterns.append("notebooks/*.ipynb")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx-mathjax-offline"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [  # what is not public: types of Python and torch, and types and constants inside of a room
    ("py:class", r"(?!whywrong\.\w+$).*"),
    ("py:data", r".*"),
]

html_theme = "furo"
html_title = project
html_copy_source = False
html_static_path, html_css_files = ["_static"], ["site.css"]


def escape_bars(app, what, name, value, options, lines):
    """In docstrings |x| is a magnitude; in reStructuredText it would be a name to fill in."""
    lines[:] = [line.replace("|", r"\|") for line in lines]


def keep_alt(app, document, source):
    """Myst-nb takes the text of a picture from the metadata of its cell; that of Jupyter is in the output's."""
    if not document.startswith("notebooks/"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if text := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell["metadata"]["mystnb"] = {"image": {"alt": text}}
    source[0] = json.dumps(notebook)


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", keep_alt)
    app.connect("autodoc-process-docstring", escape_bars)
