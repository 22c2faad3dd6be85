"""Trackers, which show a run besides metrics.jsonl: Weights & Biases, TensorBoard, or a class that a config names."""
