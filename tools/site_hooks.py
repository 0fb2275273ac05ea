"""Hooks of the documentation site (``mkdocs.yml``): pages stay readable in the repository, where links leave ``docs/``.

A link to a file of the repository that is no page of ``docs/`` (an example, a table of figures, the chart's values) leads to a page of the
site with that file's content. Links to folders, for which the site has no page, become plain text. Nothing is fetched from other hosts.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = "docs/"
COPIES = "repository/"
"""Folder of the site for what lies outside ``docs/``."""
OPTIONAL_PAGES = {"compare.md", "python-api.md", "scale.md"}
"""Pages that the navigation has a place for; where one does not exist its entry is left out."""
PICTURES = {".png", ".svg", ".html"}
LANGUAGES = {".yaml": "yaml", ".py": "python", ".jsonl": "json", ".json": "json", ".toml": "toml", "": "bash"}

_CODE_OR_LINK = re.compile(r"(?P<code>^(?P<fence>```|~~~).*?^(?P=fence)|`[^`\n]+`)|\]\((?P<target>[^)\s]+)\)", re.MULTILINE | re.DOTALL)
_LINK_TO_FOLDER = re.compile(r"(?<!!)\[([^\]\n]*)\]\(folder:\)")
_CELL = re.compile(r"<t[dh]\b[^>]*>.*?</t[dh]>", re.DOTALL)
_LONG_CODE = re.compile(r"(?<=<code>)[^<]{17,}(?=</code>)")
_WORD_END = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=\w[._/:=])(?=[A-Za-z])")
_LIST_ITEM = re.compile(r"(- |\d+\. )")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out entries of the navigation for optional pages that do not exist."""
    missing = {name for name in OPTIONAL_PAGES if not (REPOSITORY / DOCS / name).exists()}
    config.nav = without(config.nav, missing)
    return config


def without(entry: Any, missing: set[str]) -> Any:
    """A part of the navigation without these pages."""
    if isinstance(entry, list):
        return [without(item, missing) for item in entry if not (isinstance(item, dict) and missing.intersection(map(str, item.values())))]
    if isinstance(entry, dict):
        return {title: without(item, missing) for title, item in entry.items()}
    return entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file of the repository that a page links to, and what those files link to in turn."""
    waiting = [f"{DOCS}{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        place = waiting.pop()
        for path in links((REPOSITORY / place).read_text(encoding="utf-8"), place):
            if path in seen or path.startswith(DOCS) or not (REPOSITORY / path).is_file():
                continue
            seen.add(path)
            files.append(copy_of(path, config))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site needs them, and the empty lines before lists that Python-Markdown asks for and GitHub does not."""
    uri = page.file.src_uri
    place = uri.removeprefix(COPIES) if uri.startswith(COPIES) else f"{DOCS}{uri}"

    def rewritten(match: re.Match[str]) -> str:
        target = match["target"]
        if match["code"] or "://" in (target or "") or (target or "#").startswith(("#", "mailto:")):
            return match[0]
        name, _, anchor = target.partition("#")
        path = resolved(name, place)
        if (REPOSITORY / path).is_dir():
            return "](folder:)"
        return f"]({posixpath.relpath(uri_of(path), posixpath.dirname(uri) or '.')}{f'#{anchor}' if anchor else ''})"

    return separated_lists(_LINK_TO_FOLDER.sub(r"\1", _CODE_OR_LINK.sub(rewritten, markdown)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tables whose code may break between the words of a name."""
    return with_breaks(html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """A page that asks no other host for anything."""
    return without_foreign_script(output)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for the page "not found"."""
    return without_foreign_script(output_content)


def without_foreign_script(html: str) -> str:
    """Without the one script that the theme's plugin offline loads from another host: the search of pages opened as files needs it."""
    return html.replace('<script src="https://unpkg.com/iframe-worker/shim"></script>', "")


def with_breaks(html: str) -> str:
    """Allow breaks in long code of table cells before capital letters and after dots, slashes, and underscores; copied text is the same."""
    return _CELL.sub(lambda cell: _LONG_CODE.sub(lambda code: _WORD_END.sub("<wbr>", code[0]), cell[0]), html)


def links(text: str, place: str) -> list[str]:
    """Paths below the repository that a page links to."""
    targets = [match["target"] for match in _CODE_OR_LINK.finditer(text) if match["target"]]
    return [resolved(target.partition("#")[0], place) for target in targets if "://" not in target and not target.startswith("#")]


def resolved(target: str, place: str) -> str:
    """A target relative to the page at ``place``, relative to the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), target))


def uri_of(path: str) -> str:
    """Where the site's sources have a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    name = "/".join(f"dot-{part[1:]}" if part.startswith(".") else part for part in path.split("/"))
    return f"{COPIES}{name}" if Path(path).suffix in PICTURES | {".md"} else f"{COPIES}{name}.md"


def copy_of(path: str, config: MkDocsConfig) -> File:
    """A file from outside ``docs/``: pages and pictures as they are, other texts as a page with one block of code."""
    source, suffix = REPOSITORY / path, Path(path).suffix
    arguments: dict[str, Any] = {"abs_src_path": str(source)}
    if suffix not in PICTURES | {".md"}:
        arguments = {"content": f"# {path}\n\n```` {LANGUAGES.get(suffix, 'text')}\n{source.read_text(encoding='utf-8')}\n````\n"}
    return File.generated(config, uri_of(path), **arguments)


def separated_lists(markdown: str) -> str:
    """The text with an empty line between a paragraph and the list that follows it."""
    lines: list[str] = []
    is_code = False
    for line in markdown.split("\n"):
        previous = lines[-1] if lines else ""
        if line.lstrip().startswith(("```", "~~~")):
            is_code = not is_code
        elif (
            not is_code and _LIST_ITEM.match(line) and previous.strip() and not _LIST_ITEM.match(previous) and not previous.startswith(" ")
        ):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
