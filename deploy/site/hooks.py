"""What mkdocs.yml cannot say. The site is laid out as the repository is, so that a link from page
to page holds in both; the README is its home.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / ".site"  # deploy.site.reference writes here
# Code is matched first, so that nothing inside of it is taken for a link.
LINK = re.compile(
    r"^ {0,3}(?P<fence>```|~~~).*?^ {0,3}(?P=fence)|(?P<ticks>`+)(?!`).+?(?P=ticks)"
    r"|(?<!!)\[(?P<words>[^\[\]]+)\]\((?P<target>[^)\s#:]+)\)",
    re.DOTALL | re.MULTILINE,
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make anchors as GitHub does, and name the repository if whoever builds knows it."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    repository = os.environ.get("MLX_GATEWAY_REPOSITORY") or os.environ.get("GITHUB_REPOSITORY")
    if repository:
        # Not `repo_url`: for that each reader's browser asks the API of GitHub for stars.
        config.extra["repository"] = f"https://github.com/{repository}"
        link = {"icon": "fontawesome/brands/github", "link": config.extra["repository"]}
        config.extra["social"] = [link]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put docs/ and the reference into a folder of that name, and other pages beside it."""
    docs = {f"docs/{file.src_uri}": ROOT for file in files if file.src_dir == config.docs_dir}
    reference = {f"docs/{path.name}": GENERATED for path in GENERATED.glob("docs/*")}
    mentioned = (*named(config.nav), *config.extra_css)
    beside = {name: ROOT for name in mentioned if name not in reference}
    assets = [file for file in files if file.src_dir != config.docs_dir]
    laid = [
        File(name, str(folder), config.site_dir, config.use_directory_urls)
        for name, folder in {**docs, **beside, **reference}.items()
    ]
    return Files([*assets, *laid])


def named(nav: Any) -> list[str]:
    """List the pages that a navigation names, as it nests lists and sections."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [name for entry in entries for name in named(entry)]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files that are not on the site to the repository, or into plain words."""

    def turned(link: re.Match[str]) -> str:
        if link["target"] is None:
            return link[0]
        folder = posixpath.dirname(page.file.src_uri)
        path = posixpath.normpath(posixpath.join(folder, link["target"]))
        if files.get_file_from_path(path) is not None or not (ROOT / path).exists():
            return link[0]
        if "repository" in config.extra:
            return f"[{link['words']}]({config.extra['repository']}/blob/HEAD/{path})"
        return str(link["words"])

    return LINK.sub(turned, markdown)
