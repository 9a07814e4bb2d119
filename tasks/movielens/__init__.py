"""MovieLens: ratings of films, as in the FedRecon paper."""
