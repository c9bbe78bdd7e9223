"""MkDocs hook: pages that live outside docs/ become pages of the site, and links between the two sides work in
both.

On disk (and on a code host) docs/train.md links to `../BENCHMARKS.md`, and BENCHMARKS.md to `docs/metrics.md`. In
the site both are in one folder, so links to other pages and images are resolved on disk first and then rewritten.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

PAGES = {
    "benchmarks.md": "BENCHMARKS.md",
    "notes.md": "benchmarks/NOTES.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Name in the site -> path in the repository."""

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files, config):
    """Adds the pages from outside docs/."""
    root = Path(config.config_file_path).parent
    for page, source in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links for the places that pages have in the site."""
    root = Path(config.config_file_path).parent
    docs = Path(config.docs_dir)
    source = root / PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    in_site = {root / path: docs / page for page, path in PAGES.items()}

    def rewrite(match):
        target = Path(os.path.normpath(source.parent / match[1]))
        target = in_site.get(target, target)
        return os.path.relpath(target, (docs / page.file.src_uri).parent)

    return LINK.sub(rewrite, markdown)
