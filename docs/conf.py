"""How `make docs` builds the pages: see the Sphinx documentation.

The README, the list of changes, the benchmarks and the notebooks are copied
into `docs/api` before the build. `docs/reference` has a page for each concept
of the API.
"""

import ast
import pathlib
import re
import shutil
import textwrap
from typing import Any

import sphinx.application

import tff_partial as tff_partial  # Before TensorFlow, which then says less.
from tff_partial_programs import baselines as baselines

_DOCS = pathlib.Path(__file__).parent
_ROOT = _DOCS.parent
_MADE = _DOCS / 'api'

project = 'tff_partial'
release = tff_partial.__version__
html_title = f'{project} {release}'
extensions = [
  'myst_nb',
  'sphinx.ext.autodoc',
  'sphinx.ext.napoleon',
  'sphinx.ext.viewcode',
]
html_theme = 'furo'
html_copy_source = False
html_show_copyright = False
exclude_patterns = ['api/included']

# Notebooks are kept without outputs, and run by `make notebooks`.
nb_execution_mode = 'off'
myst_heading_anchors = 4
myst_enable_extensions = ['colon_fence']

autodoc_member_order = 'bysource'
autodoc_typehints_format = 'short'
autodoc_default_options = {'members': True, 'show-inheritance': True}
napoleon_use_ivar = True  # Attributes of a class stand in its own text.
default_role = 'literal'


def _page_of(target: str) -> str | None:
  """Return the page about a file or folder, from the top of the docs."""
  path, _, anchor = target.partition('#')
  anchor = f'#{anchor}' if anchor else ''
  if path.startswith('docs/'):
    return path.removeprefix('docs/') + anchor
  if path.startswith('notebooks/') and path.endswith('.ipynb'):
    return f'api/{path}'
  if path in ('CHANGELOG.md', 'benchmarks/README.md'):
    return f'api/{_name(path)}.md'
  return None


def _name(path: str) -> str:
  return path.removesuffix('/README.md').removesuffix('.md').lower()


def _with_pages(text: str, folder: str, up: str) -> str:
  """Leads links between files of the project to their pages.

  Args:
    text: Markdown.
    folder: Where it stands, from the top of the project.
    up: From where it is shown to the top of the documentation.
  """

  def lead(link: re.Match[str]) -> str:
    shown, target = link.groups()
    if '://' in target or target.startswith('#'):
      return link.group()
    whole = (_ROOT / folder / target.partition('#')[0]).resolve()
    path = str(whole.relative_to(_ROOT)) + target[len(target.split('#')[0]) :]
    if whole.suffix == '.png':
      return f'[{shown}]({up}{path.removeprefix("docs/")})'
    page = _page_of(path)
    return shown if page is None else f'[{shown}]({up}{page})'

  return re.sub(r'\[((?:[^\][]|\[[^\]]*\])*)\]\(([^)\s]+)\)', lead, text)


def _write_pages(app: sphinx.application.Sphinx) -> None:
  """Write the pages that follow from the rest of the project."""
  del app
  shutil.rmtree(_MADE, ignore_errors=True)
  (_MADE / 'included').mkdir(parents=True)
  for path in ('CHANGELOG.md', 'benchmarks/README.md'):
    source = _ROOT / path
    folder = str(source.parent.relative_to(_ROOT))
    text = source.read_text('utf-8')
    (_MADE / f'{_name(path)}.md').write_text(_with_pages(text, folder, '../'))
  notebooks = _MADE / 'notebooks'
  notebooks.mkdir()
  for notebook in sorted((_ROOT / 'notebooks').glob('*.ipynb')):
    shutil.copy(notebook, notebooks)
  readme = (_ROOT / 'README.md').read_text('utf-8')
  (_MADE / 'included' / 'readme.md').write_text(_with_pages(readme, '.', ''))


def _lead_links(
  app: sphinx.application.Sphinx, name: str, source: list[str]
) -> None:
  """Leads the links of a page that stands in the project as it is."""
  del app
  if not name.startswith('api/') and name != 'index':
    folder = (pathlib.PurePosixPath('docs') / name).parent
    source[0] = _with_pages(source[0], str(folder), '../' * name.count('/'))


def _as_written(
  app: sphinx.application.Sphinx,
  what: str,
  name: str,
  documented: Any,
  options: Any,
  lines: list[str],
) -> None:
  """Take docstrings for what they are: text with `code`, and no RST."""
  del app, what, name, documented, options
  parts = re.split(
    r'(?m)^```(?:python)?\n(.*?)^```$', '\n'.join(lines), flags=re.S
  )
  made: list[str] = []
  for place, part in enumerate(parts):
    if place % 2:
      made += ['', *_code(textwrap.indent(part, '    ')), '']
    else:
      for paragraph in re.split(r'\n{2,}', part):
        # What a docstring itself sets off by four, and no list or section.
        is_code = paragraph.startswith('    ') and ''.join(made).strip()
        if is_code and not _inside(made):
          made += [*_code(paragraph), '']
        else:
          made += [*_text(paragraph).split('\n'), '']
  lines[:] = made


def _inside(lines: list[str]) -> bool:
  """Whether what comes last is indented: a section, or an item of a list."""
  last = next((line for line in reversed(lines) if line.strip()), '')
  return last.startswith((' ', '*   '))


def _code(text: str) -> list[str]:
  """Return a paragraph indented by four, as code."""
  try:
    ast.parse(textwrap.dedent(text))
    language = 'python'
  except SyntaxError:
    language = 'text'
  return [f'.. code-block:: {language}', '', *text.split('\n')]


def _text(text: str) -> str:
  """Return a paragraph with marks of code doubled and RST escaped."""
  pieces = re.split(r'(`[^`]+`)', text)
  for place, piece in enumerate(pieces):
    if place % 2:
      pieces[place] = f'``{piece[1:-1]}``'.replace('\n', ' ')
    else:
      # Stars that begin items of lists stay.
      pieces[place] = re.sub(
        r'(?m)((?<!^)\*|^\*(?! )|[|\\]|(?<=\w)_(?!\w))', r'\\\1', piece
      )
  return ''.join(pieces)


def _skip(
  app: sphinx.application.Sphinx,
  what: str,
  name: str,
  documented: Any,
  skip: bool,
  options: Any,
) -> bool | None:
  """Leaves out fields of tuples, which their class describes, and others'."""
  del app, what, name, skip, options
  is_field = type(documented).__name__ == '_tuplegetter'
  is_others = getattr(documented, '__module__', '').startswith('matplotlib')
  return True if is_field or is_others else None


def setup(app: sphinx.application.Sphinx) -> None:
  """Connect the functions above; Sphinx calls this."""
  app.connect('builder-inited', _write_pages)
  app.connect('source-read', _lead_links)
  # Before napoleon, which turns sections of a docstring into RST.
  app.connect('autodoc-process-docstring', _as_written, priority=400)
  app.connect('autodoc-skip-member', _skip)
