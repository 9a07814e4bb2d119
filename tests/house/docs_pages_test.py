"""The pages of documentation: all are found, and their links lead somewhere."""

import inspect
import pathlib
import re
import typing

import pytest

import tff_partial
from tff_partial import client_statistics
from tff_partial import contexts
from tff_partial import phases
from tff_partial import terms

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / 'docs'
PAGES = sorted(
  path.relative_to(DOCS).as_posix()
  for pattern in ('*.md', 'reference/*.md', 'results/*.md')
  for path in DOCS.glob(pattern)
)
# Links of Markdown, but for those inside code.
_LINK = re.compile(r'\]\(([^)\s]+)\)')


def prose(path: pathlib.Path) -> str:
  """A page without its blocks of code."""
  return re.sub(r'```.*?```', '', path.read_text('utf-8'), flags=re.S)


def test_every_page_is_in_the_index():
  index = (DOCS / 'index.md').read_text('utf-8')
  listed = set(re.findall(r'^((?:reference/|results/)?[a-z_]+)$', index, re.M))
  assert {f'{name}.md' for name in listed} == set(PAGES) - {'index.md'}


def test_all_that_a_clients_functions_can_use_is_listed():
  page = (DOCS / 'new_algorithm.md').read_text('utf-8')
  listed = set(re.findall(r'\w+', ' '.join(re.findall(r'`[^`\n]+`', page))))
  kinds = contexts.ClientContext, contexts.Batch, contexts.Outcome
  fields = {
    name for kind in (*kinds, client_statistics.Server) for name in dir(kind)
  }
  names = {name for name in fields - {*dir(tuple)} if not name.startswith('_')}
  names |= {kind.__name__ for kind in typing.get_args(phases.Part)}
  names |= {
    name
    for module in (terms, contexts)
    for name, value in vars(module).items()
    if inspect.isfunction(value)
    and value.__module__ == module.__name__
    and not name.startswith('_')
  } - {'batch_of', 'outcome_of'}  # `client.batch` and `client.outcome`.
  assert names - listed == set()


def test_the_reference_has_all_functions_and_classes():
  pages = ' '.join(p.read_text('utf-8') for p in DOCS.glob('reference/*.md'))
  for package in (tff_partial, tff_partial.algorithms):
    for name in package.__all__:
      if not inspect.ismodule(getattr(package, name)):
        assert f'{package.__name__}.{name}\n' in pages, name


@pytest.mark.parametrize(
  'page',
  [
    *(f'docs/{name}' for name in PAGES if name != 'index.md'),
    *('README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'SECURITY.md'),
    *('baselines/README.md', 'benchmarks/README.md'),
  ],
)
def test_links_lead_somewhere(page):
  path = ROOT / page
  for target in _LINK.findall(prose(path)):
    file, _, anchor = target.partition('#')
    if '://' in target:
      continue
    found = (path.parent / file).resolve() if file else path
    assert found.exists(), f'{page}: {target}'
    if anchor and found.suffix == '.md':
      headings = re.findall(r'^#+ (.*)$', prose(found), re.M)
      anchors = {
        re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')
        for heading in headings
      }
      assert anchor in anchors, f'{page}: {target}'
