"""Local training of one site: objectives, batches, learners, metrics."""
