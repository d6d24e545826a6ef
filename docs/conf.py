"""Sphinx: how the pages become a site. `make docs` builds it."""

from pathlib import Path
from typing import Any

import gradwire

project = "gradwire"
author = "The gradwire developers"
copyright = "The gradwire developers"  # noqa: A001
release = version = gradwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"gradwire {release}"
html_static_path = ["_static"]
html_css_files = ["gradwire.css"]
html_theme_options = {
    "source_repository": "https://github.com/gradwire/gradwire/",
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Links such as [x](reliability.md#resume) need anchors like GitHub's.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence"]

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # gradwire.adapters imports them


def list_other_pages(app: Any, name: str, source: list[str]) -> None:
    """List the pages that the front page does not name, so that a new page is found by readers."""
    marker = "<!-- other pages -->"
    if name == "index" and marker in source[0]:
        pages = sorted(path.stem for path in Path(app.srcdir).glob("*.md") if path.stem != "index")
        others = [page for page in pages if f"\n{page}\n" not in source[0]]
        lines = ["```{toctree}", ":hidden:", ":caption: More", "", *others, "```"]
        source[0] = source[0].replace(marker, "\n".join(lines) if others else "")


def setup(app: Any) -> None:
    """Connect the function above."""
    app.connect("source-read", list_other_pages)
