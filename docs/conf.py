"""Configuration of the pages as a site: `make docs`, with Sphinx and MyST, without any network.

The sources start at the root of the repository, because pages link to READMEs of services and examples. Every page is
one that people read in the repository too: a link to a folder becomes the README in it, or its text alone. A link to
a page that the site leaves out, such as the figures of benches, becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")

project = "Flotilla"
author = "The authors of Flotilla"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**", "*.md", "services/*/README.md"]
include_patterns += ["examples/*/README.md", "recipes/*.md", "recipes/*/README.md"]
include_patterns += ["deploy/README.md", "deploy/*/README.md"]
exclude_patterns = ["docs/conf.py"]
suppress_warnings = ["myst.header"]  # the reference goes as deep as the configuration does
highlight_language = "none"
myst_heading_anchors = 6
html_theme = "furo"
html_title = "Flotilla"
html_show_copyright = False
html_copy_source = False


def within_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links to folders to the README in them, and leave the text alone of those to pages that are not here."""
    here = (ROOT / page).parent

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups(default="")
        path = (here / target).resolve()
        if path.is_dir():
            path, target = path / "README.md", f"{target.rstrip('/')}/README.md"
        elif path.suffix != ".md" or not path.is_file():
            return match[0]
        known = (
            path.is_relative_to(ROOT) and str(path.relative_to(ROOT).with_suffix("")) in app.env.found_docs
        )
        return f"[{text}]({target}{anchor})" if known else text

    source[0] = LINK.sub(link, source[0])


def with_every_page(app: Sphinx, page: str, source: list[str]) -> None:
    """List the pages that nobody has given a place in the index yet at its end."""
    if page != root_doc:
        return
    here = (ROOT / page).parent
    listed = {(here / line).resolve() for line in source[0].splitlines()}
    others = sorted(other for other in app.env.found_docs - {page} if ROOT / other not in listed)
    if others:
        entries = "\n".join(f"/{other}" for other in others)
        source[0] += f"\n```{{toctree}}\n:caption: More\n:maxdepth: 1\n\n{entries}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", within_the_site)
    app.connect("source-read", with_every_page)
