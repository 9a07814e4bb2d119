"""One tree over all shards, whoever merges which of them."""

import pytest

from tff_partial.runtimes import merging


def _pair(one, other):
  return one, other


def _merged(totals):
  tree = merging.Tree(_pair)
  for total in totals:
    tree.add(total)
  return tree.root()


def _expected(totals):
  """The tree as it is defined."""
  if len(totals) == 1:
    return totals[0]
  half = 1
  while 2 * half < len(totals):
    half *= 2
  return _expected(totals[:half]), _expected(totals[half:])


def test_by_hand():
  assert _merged('a') == 'a'
  assert _merged('ab') == ('a', 'b')
  assert _merged('abc') == (('a', 'b'), 'c')
  assert _merged('abcd') == (('a', 'b'), ('c', 'd'))
  assert _merged('abcdef') == ((('a', 'b'), ('c', 'd')), ('e', 'f'))


@pytest.mark.parametrize('block', [1, 2, 4, 8, 32])
def test_who_merges_a_block_changes_nothing(block):
  for number in range(1, 140):
    shards = list(range(number))
    blocks = [shards[at : at + block] for at in range(0, number, block)]
    assert _merged(map(_merged, blocks)) == _expected(shards)
