"""Three invented schools, in place of the many that a task invents."""

from collections.abc import Iterator
import contextlib
import functools

import pytest

from tasks.user_modeling import synthetic

# Of 5, 8 and 12 users, who gave some 12 answers each to 19 of 20 items.
generate = functools.partial(
  *(synthetic.generate, 3, 5, 12),
  num_items=20,
  num_attributes=4,
  records_per_user=12,
)


@contextlib.contextmanager
def instead() -> Iterator[None]:
  """Within the context, tasks with invented data have these schools."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(synthetic, 'generate', generate)
    yield
