"""Hook of mkdocs: the site has the Markdown of the repository, and what it links to, in its own
places. So links work in both."""

import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.structure.files import File, Files

PAGE = re.compile(r"([A-Z]+|studies/README|(docs|results)/.*)\.md")
LINK = re.compile(r"\]\(([^)#:]+)[^):]*\)")  # to a file of the repository


def on_files(files: Files, config) -> Files:
    root = Path(config.config_file_path).parent
    tracked = subprocess.check_output(["git", "ls-files"], cwd=root, text=True).splitlines()
    wanted = {name for name in tracked if PAGE.fullmatch(name)}
    for page in tuple(wanted):
        for link in LINK.findall((root / page).read_text(encoding="utf-8")):
            wanted.add(posixpath.normpath(posixpath.join(posixpath.dirname(page), link)))
    found = [name for name in tracked if name in wanted]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = [File.generated(config, name, abs_src_path=str(root / name)) for name in found]
    return Files(theme + ours)
