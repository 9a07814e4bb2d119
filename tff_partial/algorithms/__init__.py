"""Algorithms whose models are partly local, one module per paper."""

from tff_partial.algorithms.fed_embed import build_fed_embed
from tff_partial.algorithms.fed_embed import build_fed_embed_eval
from tff_partial.algorithms.fed_recon import build_fed_recon
from tff_partial.algorithms.fed_recon import build_fed_recon_eval
from tff_partial.algorithms.fed_recon import build_fed_recon_fine_tuning_eval
from tff_partial.algorithms.furl import build_furl
from tff_partial.algorithms.furl import build_furl_eval
from tff_partial.algorithms.hpfl import build_hpfl
from tff_partial.algorithms.hpfl import build_hpfl_eval
