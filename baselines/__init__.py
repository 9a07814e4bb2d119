"""Other papers' methods, to compare with, one module a paper."""

from baselines.centralized import build_centralized
from baselines.ditto import build_ditto
from baselines.ditto import build_ditto_eval
from baselines.fed_alt import build_fed_alt
from baselines.fed_alt import build_fed_alt_eval
from baselines.fed_avg import build_fed_avg
from baselines.fed_avg import build_fed_avg_eval
from baselines.fed_babu import build_fed_babu
from baselines.fed_babu import build_fed_babu_eval
from baselines.fed_opt import build_fed_adam
from baselines.fed_opt import build_fed_yogi
from baselines.fed_per import build_fed_per
from baselines.fed_per import build_fed_per_eval
from baselines.fed_prox import build_fed_prox
from baselines.fed_rep import build_fed_rep
from baselines.fed_rep import build_fed_rep_eval
from baselines.fed_sgd import build_fed_sgd
from baselines.fed_sim import build_fed_sim
from baselines.fed_sim import build_fed_sim_eval
from baselines.fine_tuning import build_fine_tuning_eval
from baselines.lg_fed_avg import build_lg_fed_avg
from baselines.lg_fed_avg import build_lg_fed_avg_eval
from baselines.local_only import build_local_only
from baselines.local_only import build_local_only_eval
from baselines.p_fed_me import build_p_fed_me
from baselines.p_fed_me import build_p_fed_me_eval
