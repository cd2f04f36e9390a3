"""For mkdocs: the root's own pages belong to the site, too, and links lead to and from them."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files, config):
    root = Path(config["config_file_path"]).parent
    for source, page in ROOT_PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (root / source).read_text())
        files.append(File.generated(config, page, content=_to_pages(text)))
    return files


def on_page_markdown(markdown, **_):
    root_file = "|".join(ROOT_PAGES)
    return _to_pages(re.sub(rf"\]\(\.\./((?:\.\./)*)({root_file})", r"](\1\2", markdown))


def _to_pages(markdown):
    """Links to the root's files, as files beside the page, become links to their pages."""
    for source, page in ROOT_PAGES.items():
        markdown = re.sub(rf"\]\(((?:\.\./)*){source}", rf"](\g<1>{page}", markdown)
    return markdown
