"""What MkDocs calls when it builds the site: the made pages, the navigation, and the files for programs.

Beside each page lies its Markdown (`guide/config.html`, `guide/config.md`), and at the root of the site `llms.txt`, a
list of all pages for programs, `config.schema.json` and `errors.json`.
"""

import fnmatch
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import site_pages
from mkdocs.structure.files import File
from site_graph import svg

_INFO = re.compile(r"^(```\w+) \w+$", re.MULTILINE)  # `console slow` is for the tests of the pages
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_BOOST = {"start": 2, "guide": 2, "about": 0.5, "reference/python": 0.5}  # whose results come first
_texts = {}


def on_config(config):
    """Write the navigation out: a pattern such as `start/*.md` stands for the pages that nothing else names."""
    paths = [path.relative_to(config.docs_dir).as_posix() for path in sorted(Path(config.docs_dir).rglob("*.md"))]
    paths += [path for path in sorted(site_pages.pages()) if path not in paths]
    named = set(_named(config.nav))
    config.nav = _written_out(config.nav, [path for path in paths if path not in named])
    return config


def _named(entries):
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values():
                yield from [inner] if isinstance(inner, str) else _named(inner)


def _written_out(entries, others):
    written = []
    for entry in entries:
        if isinstance(entry, str):
            written += fnmatch.filter(others, entry) if "*" in entry else [entry]
        else:
            ((title, inner),) = entry.items()
            written.append({title: inner if isinstance(inner, str) else _written_out(inner, others)})
    return written


def on_files(files, config):
    """Add the made pages and the files for programs."""
    for_programs = {"config.schema.json": site_pages.schema_text(), "errors.json": site_pages.errors_text()}
    for path, text in {**site_pages.pages(), **for_programs}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Keep the Markdown of a page for programs, and return what is shown."""
    text = _INFO.sub(r"\1", site_pages.within_site(page.file.src_uri, _COMMENT.sub("", markdown)))
    _texts[page.file.src_uri] = text
    page.meta["search"] = {"boost": _boost(page.file.src_uri)}
    return _MERMAID.sub(lambda graph: f"{svg(graph[1])}\n", text)


def _boost(path):
    return next((boost for folder, boost in _BOOST.items() if path.startswith(f"{folder}/")), 1)


def on_page_content(html, page, config, files):
    """Let the search find `SaveBest` also as `savebest`: the name is indexed as two words."""
    name = re.fullmatch(r"reference/\w+/(?!index)(\w+)\.md", page.file.src_uri)
    return f"{html}\n<span hidden>{name[1]}</span>" if name else html


def on_post_page(output, page, config):
    """Add what readers without a mouse or with a screen reader need."""
    output = re.sub(r"<th[^>]*></th>", "<td></td>", output)
    return on_post_template(output).replace("<pre><span></span><code>", '<pre><span></span><code tabindex="0">')


def on_post_template(output, **others):
    """Name the search, which is also on the page of what is not found."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def on_post_build(config):
    """Write the Markdown beside each page, and the list of all pages."""
    place = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for title, paths in _sections(config.nav):
        lines += [f"## {title}", ""]
        for path in paths:
            (place / path).write_text(_texts[path], encoding="utf-8")
            lines.append(f"- [{_title(_texts[path])}]({path}): {_first_sentence(_texts[path])}")
        lines.append("")
    lines += ["## Files", "", "- [JSON schema of a config](config.schema.json)", "- [Codes of errors](errors.json)", ""]
    (place / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def _sections(nav):
    for entry in nav:
        ((title, inner),) = entry.items()
        yield title, [inner] if isinstance(inner, str) else list(_named(inner))


def _title(text):
    return re.search(r"^# (.*)$", text, re.MULTILINE)[1]


def _first_sentence(text):
    for block in text.partition("\n# ")[2].split("\n\n")[1:] or text.split("\n\n")[1:]:
        if re.match(r"[A-Z]", block):
            return re.split(r"(?<=[.:]) (?=[A-Z`])", " ".join(block.split()))[0]
    return ""
