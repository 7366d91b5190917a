"""For MkDocs: pages of reference are made from the code, and linked files join the site.

So links such as ../pyproject.toml work in the site and where a code host shows plain Markdown.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()\.\./(?P<path>[^)#\s]+)")
_FOLDER = "repository"
"""Of the site, where these files stand."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add pages that are made from the code, and what pages link to outside of docs/."""
    root = Path(config.docs_dir).parent
    texts = [page.content_string for page in files.documentation_pages()]
    sys.path.insert(0, config.docs_dir)
    from reference import pages  # noqa: PLC0415 - beside this file

    made = pages([*texts, (root / "README.md").read_text()])
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for section in config.nav or ():
        if "Reference" in section:
            section["Reference"] += _sections(made)
    for path in sorted({match["path"] for text in texts for match in _LINK.finditer(text)}):
        if (root / path).is_file():
            files.append(
                File.generated(
                    config,
                    f"{_FOLDER}/{path}",
                    abs_src_path=str(root / path),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
    return files


def _sections(paths: Iterable[str]) -> list[Any]:
    """The navigation of generated pages: commands by program, and the catalog by kind."""
    found: dict[str, list[Any]] = {}
    for path in paths:
        folder, _, name = path.removesuffix(".md").rpartition("/")
        program, _, rest = name.partition("-")
        if folder or program == "catalog":
            title = f"Commands of {program}" if folder else "Catalog"
            found.setdefault(title, []).append({rest.replace("-", " "): path})
    return [{title: pages} for title, pages in found.items()]


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point these links there; a link to nothing stays as it is, and fails a strict build."""
    del page, config

    def there(match: re.Match[str]) -> str:
        inside = f"{_FOLDER}/{match['path']}"
        return inside if files.get_file_from_path(inside) else match[0]

    return _LINK.sub(there, markdown)
