"""FedAvg (McMahan et al., AISTATS 2017), Algorithm 1.

Nothing is local: a model with local variables is refused, since they would not
be trained. If each user has a row of a table at the server (footnote 4 of the
FedRecon paper), that is FedAvg on a model which reads the user's index.

Deviation: clients process their examples in order unless `training` shuffles;
the paper uses random batches.
"""

from tff_partial.templates import partial_training

build_fed_avg = partial_training.build_global
build_fed_avg_eval = partial_training.build_evaluation
