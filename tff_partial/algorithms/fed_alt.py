"""FedAlt (Pillutla et al., ICML 2022), with LocalAlt as the local update.

The paper's v are the local variables, its u the global ones. `personal` trains
v while u is fixed: tau_v steps with gamma_v; then `shared` trains u while v is
fixed: tau_u steps with gamma_u. With `personalise`, an evaluation first
tunes v, as in the final step of the paper's experiments; new clients need it.

Deviations: each client initializes its v itself, where the paper starts from a
pretrained model; clients are weighted by their examples unless
`client_weighting` says otherwise.
"""

from tff_partial.templates import partial_training

build_fed_alt = partial_training.build_alternating
build_fed_alt_eval = partial_training.build_evaluation
