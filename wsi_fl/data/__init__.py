"""Labelled examples and what is known of each: tasks, privacy units, splits, predictions and scores."""
