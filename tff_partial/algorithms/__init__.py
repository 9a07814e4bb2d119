"""Algorithms whose models are partly local, one module per paper."""

from tff_partial.algorithms.apfl import build_apfl
from tff_partial.algorithms.apfl import build_apfl_eval
from tff_partial.algorithms.ditto import build_ditto
from tff_partial.algorithms.ditto import build_ditto_eval
from tff_partial.algorithms.dp_als import build_dp_als
from tff_partial.algorithms.fed_ala import build_fed_ala
from tff_partial.algorithms.fed_ala import build_fed_ala_eval
from tff_partial.algorithms.fed_als import build_fed_als
from tff_partial.algorithms.fed_als import build_fed_als_eval
from tff_partial.algorithms.fed_als_private import build_fed_als_private
from tff_partial.algorithms.fed_alt import build_fed_alt
from tff_partial.algorithms.fed_alt import build_fed_alt_eval
from tff_partial.algorithms.fed_avg import build_fed_avg
from tff_partial.algorithms.fed_avg import build_fed_avg_eval
from tff_partial.algorithms.fed_babu import build_fed_babu
from tff_partial.algorithms.fed_babu import build_fed_babu_eval
from tff_partial.algorithms.fed_bn import build_fed_bn
from tff_partial.algorithms.fed_bn import build_fed_bn_eval
from tff_partial.algorithms.fed_embed import build_fed_embed
from tff_partial.algorithms.fed_embed import build_fed_embed_eval
from tff_partial.algorithms.fed_ials import build_fed_ials
from tff_partial.algorithms.fed_ials import build_fed_ials_eval
from tff_partial.algorithms.fed_per import build_fed_per
from tff_partial.algorithms.fed_per import build_fed_per_eval
from tff_partial.algorithms.fed_rap import build_fed_rap
from tff_partial.algorithms.fed_rap import build_fed_rap_eval
from tff_partial.algorithms.fed_recon import build_fed_recon
from tff_partial.algorithms.fed_recon import build_fed_recon_eval
from tff_partial.algorithms.fed_recon import build_fed_recon_fine_tuning_eval
from tff_partial.algorithms.fed_rep import build_fed_rep
from tff_partial.algorithms.fed_rep import build_fed_rep_eval
from tff_partial.algorithms.fed_sim import build_fed_sim
from tff_partial.algorithms.fed_sim import build_fed_sim_eval
from tff_partial.algorithms.fine_tuning import build_fine_tuning_eval
from tff_partial.algorithms.furl import build_furl
from tff_partial.algorithms.furl import build_furl_eval
from tff_partial.algorithms.hpfl import build_hpfl
from tff_partial.algorithms.hpfl import build_hpfl_eval
from tff_partial.algorithms.lg_fed_avg import build_lg_fed_avg
from tff_partial.algorithms.lg_fed_avg import build_lg_fed_avg_eval
from tff_partial.algorithms.mr_mtl import build_mr_mtl
from tff_partial.algorithms.mr_mtl import build_mr_mtl_eval
from tff_partial.algorithms.p_fed_me import build_p_fed_me
from tff_partial.algorithms.p_fed_me import build_p_fed_me_eval
from tff_partial.algorithms.pp_sgd import build_pp_sgd
from tff_partial.algorithms.pp_sgd import build_pp_sgd_eval

__all__ = [
  'build_apfl',
  'build_apfl_eval',
  'build_ditto',
  'build_ditto_eval',
  'build_dp_als',
  'build_fed_ala',
  'build_fed_ala_eval',
  'build_fed_als',
  'build_fed_als_eval',
  'build_fed_als_private',
  'build_fed_alt',
  'build_fed_alt_eval',
  'build_fed_avg',
  'build_fed_avg_eval',
  'build_fed_babu',
  'build_fed_babu_eval',
  'build_fed_bn',
  'build_fed_bn_eval',
  'build_fed_embed',
  'build_fed_embed_eval',
  'build_fed_ials',
  'build_fed_ials_eval',
  'build_fed_per',
  'build_fed_per_eval',
  'build_fed_rap',
  'build_fed_rap_eval',
  'build_fed_recon',
  'build_fed_recon_eval',
  'build_fed_recon_fine_tuning_eval',
  'build_fed_rep',
  'build_fed_rep_eval',
  'build_fed_sim',
  'build_fed_sim_eval',
  'build_fine_tuning_eval',
  'build_furl',
  'build_furl_eval',
  'build_hpfl',
  'build_hpfl_eval',
  'build_lg_fed_avg',
  'build_lg_fed_avg_eval',
  'build_mr_mtl',
  'build_mr_mtl_eval',
  'build_p_fed_me',
  'build_p_fed_me_eval',
  'build_pp_sgd',
  'build_pp_sgd_eval',
]
