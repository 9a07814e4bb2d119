"""The algorithms by name, each built from a run's settings.

A new algorithm is one row of `ALGORITHMS`.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from tasks import task as tasks_lib
from tasks.experiment.methods import building
from tasks.experiment.methods import many_users
from tasks.experiment.methods import memorizing
from tasks.experiment.methods import reconstructing
from tasks.experiment.methods import sub_populations
from tasks.experiment.options.training import LocalTraining

_FOR_ALL = building.measured_by('build_fed_avg_eval')
_PERSONAL = LocalTraining.local_phase
_GLOBAL, _BOTH = LocalTraining.global_phase, LocalTraining.joint_phase


def _kept(
  name: str,
  build: building.Build,
  given: Callable[[Any], building.Arguments] = building.nothing,
  **said: Any,
) -> building.Algorithm:
  """Adapt an algorithm that is evaluated by what its clients keep of it."""
  return building.Algorithm(
    build,
    building.measured_by(f'build_{name}_eval', given),
    **{'personal': _PERSONAL, **said},
  )


def _partly_local(name: str, **phase_of: Any) -> building.Algorithm:
  """Adapt a builder that takes phases, and its evaluation by kept weights."""
  build = building.trained_by(f'build_{name}', **phase_of)
  return _kept(name, build, user=tasks_lib.OWN)


def _adaptive(builder: str) -> building.Algorithm:
  """Adapt a builder whose server applies an adaptive rule."""
  return building.Algorithm(
    building.trained_by(
      builder, building.adaptive, building.aggregating, training=_GLOBAL
    ),
    _FOR_ALL,
    ignores=building.STEPPING,
    reads=('tau', 'adaptive_rule'),
  )


_LOCAL_ONLY = _kept(
  'local_only',
  building.trained_by(
    'build_local_only', server=building.nothing, training=_PERSONAL
  ),
  why_not_private='clients send nothing, so nothing needs noise. Leave '
  '--target_epsilon and --noise_multiplier out.',
  ignores=(*building.JOINING, *building.UPDATING),
)

_FED_RECON = building.Algorithm(
  reconstructing.fed_recon,
  reconstructing.fed_recon_eval,
  user=tasks_lib.OWN,
  personal=_PERSONAL,
  always_personalises=True,
  reads=('joint', 'through_solution'),
)
_FED_ALS_PRIVATE = building.Algorithm(
  reconstructing.fed_als_private,
  reconstructing.fed_als_eval,
  user=tasks_lib.PUBLIC_POSTERIOR,
  personal=reconstructing.solving,
  always_personalises=True,
  ignores=(*building.JOINING, *building.TRAINING),
)
_FED_PROTO = _kept(
  'fed_proto',
  building.fed_proto,
  user=tasks_lib.FEATURES,
  why_not_private='its clients send the mean features of each class, which '
  'no noise covers. Use fed_per or fed_avg for a private run.',
  ignores=building.JOINING,
  reads=('penalty',),
)
_PER_FED_AVG = _kept(
  'per_fed_avg',
  building.per_fed_avg(hessian_free=False),
  always_personalises=True,
)
_FED_AVG = building.Algorithm(many_users.fed_avg, _FOR_ALL)
_IFCA = building.Algorithm(
  sub_populations.ifca,
  building.supported_by('build_ifca_eval'),
  user=tasks_lib.GROUPS,
)
_FED_EM = building.Algorithm(
  building.trained_by('build_fed_em', training=_GLOBAL),
  building.supported_by('build_fed_em_eval'),
  user=tasks_lib.GROUPS,
  has_memory=True,
)

ALGORITHMS: dict[str, building.Algorithm] = {
  'dp_als': dataclasses.replace(_FED_ALS_PRIVATE, build=reconstructing.dp_als),
  'fed_als': building.Algorithm(
    reconstructing.fed_als,
    reconstructing.fed_als_eval,
    user=tasks_lib.POSTERIOR,
    personal=reconstructing.solving,
    always_personalises=True,
    counts_clients=True,
    why_not_private='its sums over clients get no noise. Use fed_als_private, '
    'or fed_recon.',
    ignores=(*building.JOINING, *building.TRAINING),
  ),
  'fed_als_private': _FED_ALS_PRIVATE,
  'fed_ials': building.Algorithm(
    reconstructing.fed_ials,
    reconstructing.fed_ials_eval,
    user=tasks_lib.IMPLICIT,
    always_personalises=True,
    counts_clients=True,
    why_not_private='its sums over clients get no noise. Use fed_recon for a '
    'private run.',
    ignores=(*building.JOINING, *building.TRAINING),
    reads=('unobserved_weight', 'implicit_ridge'),
  ),
  'fed_recon': _FED_RECON,
  'fed_recon_fine_tuning': building.Algorithm(
    reconstructing.fed_recon,
    reconstructing.fed_recon_fine_tuning_eval,
    user=tasks_lib.OWN,
    personal=_PERSONAL,
    always_personalises=True,
    reads=('joint', 'through_solution', *memorizing.TUNING),
  ),
  'fed_recon_knn_per': memorizing.knn_per(_FED_RECON),
  'fed_recon_cache': memorizing.ngram_cache(_FED_RECON),
  'fed_rap': _kept(
    'fed_rap',
    building.trained_by('build_fed_rap', building.of_fed_rap, training=_BOTH),
    user=tasks_lib.ADDITIVE,
    reads=('view_difference', 'view_sparsity'),
  ),
  'furl': _kept(
    'furl',
    building.trained_by('build_furl', building.of_furl, training=_BOTH),
    user=tasks_lib.OWN,
    reads=('private_rule',),
  ),
  'fed_embed_type': sub_populations.fed_embed('type', tasks_lib.HEADS),
  'fed_embed_prototype': sub_populations.fed_embed(
    'prototype',
    tasks_lib.HEADS,
    ('triplet_steps', *sub_populations.FORMING, *sub_populations.CENTERS),
  ),
  'fed_embed_som': sub_populations.fed_embed(
    'map',
    tasks_lib.HEADS,
    (
      'map_radius',
      'map_follows_nearest',
      *sub_populations.FORMING,
      *sub_populations.CENTERS,
    ),
  ),
  'fed_embed_least_loss': sub_populations.fed_embed(
    'least_loss', tasks_lib.HEADS
  ),
  'fed_embed_personal': sub_populations.fed_embed(
    'personal', tasks_lib.OWN_HEAD, ('head_ridge',)
  ),
  'fed_per': _partly_local('fed_per', training=_BOTH),
  'fed_sim': _partly_local('fed_sim', training=_BOTH),
  'lg_fed_avg': _partly_local('lg_fed_avg', training=_BOTH),
  'fed_alt': _partly_local('fed_alt', personal=_PERSONAL, shared=_GLOBAL),
  'fed_rep': _partly_local('fed_rep', head=_PERSONAL, representation=_GLOBAL),
  'fed_babu': _kept(
    'fed_babu',
    building.trained_by('build_fed_babu', training=_GLOBAL),
    user=tasks_lib.OWN,
    always_personalises=True,
  ),
  'ditto': _kept(
    'ditto',
    building.trained_by(
      'build_ditto', building.of_penalty, training=_GLOBAL, personal=_PERSONAL
    ),
    building.of_penalty,
    reads=('penalty',),
  ),
  'p_fed_me': building.Algorithm(
    building.trained_by(
      'build_p_fed_me',
      building.of_p_fed_me,
      building.aggregating,
      personal=LocalTraining.repeated_phase,
    ),
    building.measured_by('build_p_fed_me_eval', building.penalty_of_p_fed_me),
    personal=LocalTraining.repeated_phase,
    always_personalises=True,
    reads=('penalty', 'repeats'),
    ignores=(*building.STEPPING, 'update_optimizer'),
  ),
  'scaffold': building.Algorithm(
    building.trained_by(
      'build_scaffold', building.of_scaffold, training=_GLOBAL
    ),
    _FOR_ALL,
    counts_clients=True,
    why_not_private='its clients send control variates beside their updates, '
    'which no noise covers. Use fed_prox or fed_avg for a private run.',
  ),
  'fed_dyn': building.Algorithm(
    building.trained_by(
      'build_fed_dyn',
      building.of_fed_dyn,
      building.aggregating,
      training=_GLOBAL,
    ),
    _FOR_ALL,
    counts_clients=True,
    reads=('penalty',),
    ignores=(*building.STEPPING, 'server_learning_rate'),
  ),
  'per_fed_avg': _PER_FED_AVG,
  'per_fed_avg_hessian_free': dataclasses.replace(
    _PER_FED_AVG, build=building.per_fed_avg(hessian_free=True)
  ),
  'moon': building.Algorithm(
    building.trained_by(
      'build_moon', building.penalty_and_features, training=_GLOBAL
    ),
    _FOR_ALL,
    user=tasks_lib.FEATURES,
    reads=('penalty',),
  ),
  'mr_mtl': _kept(
    'mr_mtl',
    building.trained_by('build_mr_mtl', building.of_penalty, training=_GLOBAL),
    building.of_penalty,
    reads=('penalty',),
  ),
  'pp_sgd': _kept(
    'pp_sgd', building.trained_by('build_pp_sgd', training=_BOTH)
  ),
  'fed_ala': _kept(
    'fed_ala',
    building.trained_by(
      'build_fed_ala', adaptation=_PERSONAL, training=_GLOBAL
    ),
  ),
  'ifca': _IFCA,
  'ifca_head': dataclasses.replace(_IFCA, user=tasks_lib.GROUP_HEADS),
  'fed_em': _FED_EM,
  'fed_em_head': dataclasses.replace(_FED_EM, user=tasks_lib.GROUP_HEADS),
  'apfl': _kept(
    'apfl',
    building.trained_by(
      'build_apfl',
      building.of_apfl,
      training=_GLOBAL,
      personal=LocalTraining.whole_model_phase,
    ),
    building.of_apfl,
    reads=('mixture', 'mixture_learning_rate'),
  ),
  'fed_dbe': _kept(
    'fed_dbe',
    building.trained_by(
      'build_fed_dbe', building.penalty_and_features, training=_BOTH
    ),
    user=tasks_lib.SHIFTED,
    why_not_private='its clients send the mean of their features, which no '
    'noise covers. Use fed_per or fed_avg for a private run.',
    reads=('penalty',),
  ),
  'fed_proto': _FED_PROTO,
  'fed_proto_nearest': dataclasses.replace(
    _FED_PROTO, measure=building.fed_proto_nearest_eval, has_memory=True
  ),
  'p_fed_km': sub_populations.p_fed_km('model', tasks_lib.CLUSTERS),
  'p_fed_km_head': sub_populations.p_fed_km('head', tasks_lib.HEAD_CLUSTERS),
  'local_only': _LOCAL_ONLY,
  'distributed': dataclasses.replace(
    _LOCAL_ONLY,
    build=building.trained_by(
      'build_local_only',
      server=building.nothing,
      training=LocalTraining.personal_model_phase,
    ),
    user=tasks_lib.OWN,
    personal=LocalTraining.personal_model_phase,
    ignores=building.JOINING,
  ),
  'hpfl': many_users.hpfl(),
  'hpfl_k': many_users.hpfl(drafts=False),
  'hpfl_r': many_users.hpfl(public=False),
  'fed_avg': _FED_AVG,
  'knn_per': memorizing.knn_per(_FED_AVG),
  'ngram_cache': memorizing.ngram_cache(_FED_AVG),
  'fine_tuning': building.Algorithm(
    many_users.fed_avg,
    many_users.fine_tuning_eval,
    personal=LocalTraining.tuning_phase,
    always_personalises=True,
    reads=('tuned',),
  ),
  'fed_sgd': building.Algorithm(
    many_users.fed_sgd, _FOR_ALL, ignores=building.ALL_BUT_ONE_STEP
  ),
  'fed_prox': building.Algorithm(
    many_users.fed_prox, _FOR_ALL, reads=('penalty',)
  ),
  'fed_att': _kept(
    'fed_att', building.fed_att, user=tasks_lib.OWN, ignores=building.STEPPING
  ),
  'fed_noise': _kept(
    'fed_noise',
    building.trained_by(
      'build_fed_noise', building.of_fed_noise, training=_BOTH
    ),
    user=tasks_lib.OWN,
    why_not_private='its clients add noise of their own, which no ledger '
    'counts. Use fed_avg with --dp=local for a run that is accounted for.',
    adds_noise=True,
    reads=('laplace_clip',),
  ),
  'fed_adam': _adaptive('build_fed_adam'),
  'fed_yogi': _adaptive('build_fed_yogi'),
  'centralized': building.Algorithm(
    building.trained_by(
      'build_centralized', server=building.nothing, training=_GLOBAL
    ),
    _FOR_ALL,
    is_central=True,
    why_not_private='one client holds the examples of all users, so that '
    "no update is one user's. Use fed_avg for a private run.",
    ignores=building.JOINING,
  ),
}


def readers(flag: str) -> Sequence[str]:
  """Return the names of the algorithms that read a flag."""
  return [name for name in names() if flag not in unread(name)]


def unread(algorithm: str) -> frozenset[str]:
  """Return the flags that other algorithms read and this one does not."""
  special = {flag for each in ALGORITHMS.values() for flag in each.reads}
  how = ALGORITHMS[algorithm]
  nothing_personal = () if how.personal else ('personalise_seen',)
  return frozenset(
    special.difference(how.reads).union(how.ignores, nothing_personal)
  )


def names() -> Sequence[str]:
  """Return the values that `--algorithm` takes, sorted."""
  return sorted(ALGORITHMS)
