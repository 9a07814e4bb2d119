"""Options that several tasks have: one flag each, with the task's own default.

Each makes the field of a task's class of options from its default.
"""

from collections.abc import Callable
import functools
from typing import Any

from tasks.options import option

TITLE = 'Data and model of the task'
SEEN, UNSEEN = 'seen', 'unseen'
PROTOCOLS = (UNSEEN, SEEN)


def _shared(flag: str, text: str, **limits: Any) -> Callable[..., Any]:
  return functools.partial(option, text=text, flag=flag, group=TITLE, **limits)


data_set = _shared(
  'data_set',
  'Which data: ml-1m, ml-100k or another edition of MovieLens, by default the '
  'one in --data_dir; mnist or federated_emnist; for next_word lean_chat, '
  'subreddit, stackoverflow, shakespeare, or a file or folder of JSON lines '
  'with the fields author, time and text.',
)
protocol = _shared(
  'protocol',
  'Measure users that never took part, or further or later examples of those '
  'who did.',
  choices=PROTOCOLS,
)
users = _shared(
  'users',
  'How many users the images are divided among, or how many authors are drawn; '
  '0 for all, or as many as the paper has.',
  at_least=1,
  for_none=0,
)
max_examples = _shared(
  'max_examples',
  'Examples used of each user; 0 for all.',
  at_least=1,
  for_none=0,
)
min_examples = _shared(
  'min_examples', 'Users with fewer examples are left out.', at_least=1
)
model = _shared(
  'model',
  'The model: of emnist linear, dense with one hidden layer, or cnn; of '
  'next_word lstm or transformer; of assist and movielens_hpfl GUM, NCD, NCF, '
  'or biases alone.',
)
num_factors = _shared(
  'num_factors', 'Length of item and user vectors.', at_least=1
)
biases = _shared(
  'biases', 'Give items and users biases; in GUM also attributes, and a mean.'
)
centred = _shared('centred', 'Predict around the mean training rating.')
public_mean = _shared(
  'public_mean', 'Predict around this number, which is known without the data.'
)
l2 = _shared('l2', 'L2 regularization of user weights, in stars.', at_least=0)
clip_predictions = _shared(
  'clip_predictions', 'Clip predictions to the rating scale when measuring.'
)
initial_scale = _shared(
  'initial_scale',
  'Vectors start uniform between plus and minus this, in stars.',
  python_only=True,
  at_least=0,
)
lstm_units = _shared(
  'lstm_units',
  'Units of the LSTM, in each direction if it has two.',
  at_least=1,
)
