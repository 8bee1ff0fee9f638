"""Sphinx: `make docs` builds this folder as HTML, without network; warnings are errors."""

import re

from wsi_fl import __version__

project = "wsi-fl"
author = "The wsi-fl authors"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # a notebook that fails ends `make docs`
nb_execution_raise_on_error = True
nb_execution_timeout = 300
exclude_patterns = ["_build", "decisions"]
html_extra_path = ["llms.txt"]

html_theme = "furo"
html_title = "wsi-fl"
html_show_copyright = False

autodoc_typehints = "description"
autodoc_type_aliases = {"Names": "Names"}  # NumPy's str_ ends in what docutils takes for a link
autodoc_member_order = "bysource"


def link_repository_files(app, docname, source):
    """Turn links to Markdown files of the repository outside this folder into downloads; they are no pages."""
    source[0] = re.sub(r"\]\(((?:\.\./){2}(?:studies/)?[A-Z-]+\.md)(?:#[^)]*)?\)", r"](path:\1)", source[0])


def setup(app):
    app.connect("source-read", link_repository_files)
