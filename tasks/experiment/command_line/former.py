"""Flags of earlier releases, and what took their place.

Flags that became options without a flag are not listed: `--set` takes their
names.
"""

_OF_TASKS = {
  'corpus': 'data_set',
  'emnist_edition': 'data_set',
  'emnist_max_examples': 'max_examples',
  'emnist_model': 'model',
  'emnist_protocol': 'protocol',
  'emnist_users': 'users',
  'min_documents': 'min_examples',
  'next_word_architecture': 'model',
  'next_word_lstm_units': 'lstm_units',
  'next_word_max_sentences': 'max_examples',
  'next_word_max_users': 'users',
  'next_word_min_sentences': 'min_examples',
  'next_word_protocol': 'protocol',
  'preference_users': 'users',
  'ratings_biases': 'biases',
  'ratings_centred': 'centred',
  'ratings_clip_predictions': 'clip_predictions',
  'ratings_l2': 'l2',
  'ratings_max_examples': 'max_examples',
  'ratings_min_per_user': 'min_examples',
  'ratings_num_factors': 'num_factors',
  'ratings_protocol': 'protocol',
  'ratings_public_mean': 'public_mean',
  'user_model': 'model',
  'user_model_biases': 'biases',
}
_OF_OPTIMIZERS = {
  f'{which}_{name}': f'{which}_optimizer=NAME:{name}'
  for which in ('reconstruction', 'server', 'update')
  for name in ('beta_2', 'epsilon', 'momentum')
}

# Names to the arguments that replaced them.
FORMER = {
  former: f'--{now}=VALUE'
  for former, now in {**_OF_TASKS, **_OF_OPTIMIZERS}.items()
}
