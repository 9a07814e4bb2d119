"""LG-FedAvg (Liang et al., 2020), Algorithm 1.

The model's local variables are the lower layers, which represent a client's own
data; its global ones are the layers above them. So it is FedPer upside down.
The paper starts from a model pretrained by FedAvg: pass `initial_weights` to
`from_keras`.

Deviations: the representation has only the model's own loss, which may be any.
For a new client the paper averages the predictions of all clients' models,
which would send representations from client to client. Instead, with
`personalise`, it trains its own representation before an evaluation.
"""

from tff_partial.templates import partial_training

build_lg_fed_avg = partial_training.build_simultaneous
build_lg_fed_avg_eval = partial_training.build_evaluation
