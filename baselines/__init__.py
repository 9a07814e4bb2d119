"""Methods to compare with that need no partial model, one module a paper."""

from baselines.centralized import build_centralized
from baselines.centralized import build_centralized_eval
from baselines.fed_att import build_fed_att
from baselines.fed_att import build_fed_att_eval
from baselines.fed_noise import build_fed_noise
from baselines.fed_noise import build_fed_noise_eval
from baselines.fed_opt import build_fed_adam
from baselines.fed_opt import build_fed_adam_eval
from baselines.fed_opt import build_fed_yogi
from baselines.fed_opt import build_fed_yogi_eval
from baselines.fed_proto import build_fed_proto
from baselines.fed_proto import build_fed_proto_eval
from baselines.fed_proto import build_fed_proto_nearest_eval
from baselines.fed_prox import build_fed_prox
from baselines.fed_prox import build_fed_prox_eval
from baselines.fed_sgd import build_fed_sgd
from baselines.fed_sgd import build_fed_sgd_eval
from baselines.knn_per import build_knn_per_eval
from baselines.local_only import build_local_only
from baselines.local_only import build_local_only_eval
from baselines.ngram_cache import build_ngram_cache_eval
from baselines.p_fed_km import build_p_fed_km
from baselines.p_fed_km import build_p_fed_km_eval
from baselines.scaffold import build_scaffold
from baselines.scaffold import build_scaffold_eval

__all__ = [
  'build_centralized',
  'build_centralized_eval',
  'build_fed_adam',
  'build_fed_adam_eval',
  'build_fed_att',
  'build_fed_att_eval',
  'build_fed_noise',
  'build_fed_noise_eval',
  'build_fed_proto',
  'build_fed_proto_eval',
  'build_fed_proto_nearest_eval',
  'build_fed_prox',
  'build_fed_prox_eval',
  'build_fed_sgd',
  'build_fed_sgd_eval',
  'build_fed_yogi',
  'build_fed_yogi_eval',
  'build_knn_per_eval',
  'build_local_only',
  'build_local_only_eval',
  'build_ngram_cache_eval',
  'build_p_fed_km',
  'build_p_fed_km_eval',
  'build_scaffold',
  'build_scaffold_eval',
]
