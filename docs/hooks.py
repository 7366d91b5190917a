"""For MkDocs: files of the repository that pages link to, such as ../pyproject.toml, join the site.

So the same links work in the site and where a code host shows the pages as plain Markdown.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()\.\./(?P<path>[^)#\s]+)")
_FOLDER = "repository"
"""Of the site, where these files stand."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of docs/."""
    root = Path(config.docs_dir).parent
    texts = [page.content_string for page in files.documentation_pages()]
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


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point these links there; a link to nothing stays as it is, and fails a strict build."""
    del page, config

    def there(match: re.Match[str]) -> str:
        inside = f"{_FOLDER}/{match['path']}"
        return inside if files.get_file_from_path(inside) else match[0]

    return _LINK.sub(there, markdown)
