"""FedPer (Arivazhagan et al., 2019), Algorithms 1 and 2.

The model's local variables are the personalization layers, its global ones the
base layers; all are trained together. Each client initializes its
personalization layers itself. The paper has no new clients; with `personalise`,
they train their own personalization layers before an evaluation.
"""

from tff_partial.templates import partial_training

build_fed_per = partial_training.build_simultaneous
build_fed_per_eval = partial_training.build_evaluation
