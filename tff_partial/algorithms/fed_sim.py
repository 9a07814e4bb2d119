"""FedSim (Pillutla et al., ICML 2022), with LocalSim as the local update.

The paper's v are the local variables, its u the global ones; both are trained
simultaneously, with `optimizer={GLOBAL: sgd(gamma_u), LOCAL: sgd(gamma_v)}`.
With `personalise`, an evaluation first tunes v while u stays fixed, as in the
final step of the paper's experiments; new clients need it.

Deviations: each client initializes its v itself, where the paper starts from a
pretrained model; clients are weighted by their examples unless
`client_weighting` says otherwise.
"""

from tff_partial.templates import partial_training

build_fed_sim = partial_training.build_simultaneous
build_fed_sim_eval = partial_training.build_evaluation
