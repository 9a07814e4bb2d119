"""How the outcomes of foreign tests are read and judged."""

import pytest

from tests.foreign import outcomes

_RESULTS = """<?xml version="1.0"?>
<testsuites name="" tests="3" failures="1" errors="1">
<testsuite name="SumTest" tests="3">
  <testcase name="test_adds" status="run"/>
  <testcase name="test_waits"><failure message="4 != 3"/></testcase>
  <testcase name="test_ends"><error message="KeyError: 1"/></testcase>
</testsuite>
</testsuites>
"""
_ALLOWED = """# Known.

jit=*/sum_test.py::SumTest.test_w*  It wants a worker.
jit=true/mean_test.py::*  Not for us.
jit=true/other_test.py::*  It was not run.
"""


def test_only_known_failures_are_allowed(tmp_path):
  path = tmp_path / 'results.xml'
  path.write_text(_RESULTS, encoding='utf-8')
  results = {
    'jit=true/sum_test.py': outcomes.results_of(path, 1, ''),
    'jit=true/mean_test.py': {'MeanTest.test_mean': None},
  }
  verdict = outcomes.judge(results, outcomes.read_allowed(_ALLOWED))
  assert verdict.failed == {
    'jit=true/sum_test.py::SumTest.test_ends': 'KeyError: 1'
  }
  assert verdict.allowed == {
    'jit=true/sum_test.py::SumTest.test_waits': 'It wants a worker.'
  }
  assert [one.pattern for one in verdict.unused] == ['jit=true/mean_test.py::*']


def test_an_allowance_needs_a_reason():
  with pytest.raises(ValueError, match='Line 2 allows .*does not say why'):
    outcomes.read_allowed('# Known.\njit=true/sum_test.py::*\n')


@pytest.mark.parametrize(
  ('status', 'said', 'reason'),
  [
    (1, 'warning\nImportError: no\n\n', 'ImportError: no'),
    (-9, '', 'it ended with status -9'),
  ],
)
def test_a_file_that_writes_no_results_fails_as_a_whole(
  status, said, reason, tmp_path
):
  assert outcomes.results_of(tmp_path / 'none.xml', status, said) == {
    outcomes.WHOLE_FILE: reason
  }
