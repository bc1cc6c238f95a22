"""Hook of mkdocs: the site has the Markdown of the repository, and what it links to, in
its own places, so that links work in both; and the notebook as a page."""

import json
import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.structure.files import File, Files

PAGE = re.compile(r"([A-Z]+|(extras|studies)/README|(docs|results)/.*)\.md")
LINK = re.compile(r"\]\(([^)#:]+)[^):]*\)")  # to a file of the repository


def on_files(files: Files, config) -> Files:
    """Return the files of the site: those of the theme, the pages of the repository and
    what they link to, and the notebook."""
    root = Path(config.config_file_path).parent
    tracked = subprocess.check_output(
        ["git", "ls-files"], cwd=root, text=True
    ).splitlines()
    pages = [name for name in tracked if PAGE.fullmatch(name)]
    wanted = {*pages, *config.extra["polyfills"]}
    for page in pages:
        for link in LINK.findall((root / page).read_text(encoding="utf-8")):
            wanted.add(
                posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
            )
    theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = []
    for name in tracked:
        if name in wanted:
            path = str(root / name)
            ours.append(File.generated(config, name, abs_src_path=path))
    tour = File.generated(
        config, "docs/tour.md", content=page_of(root / "docs" / "tour.ipynb")
    )
    return Files([*theme, *ours, tour])


def page_of(notebook: Path) -> str:
    """Return a notebook as a page of Markdown, with its code and output."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "markdown":
            text = f"```python\n{text}\n```"
        parts.append(text)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if image := data.get("image/png"):
                parts.append(f"![output](data:image/png;base64,{image.strip()})")
            else:
                shown = "".join(output.get("text") or data.get("text/plain", ""))
                parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts)
