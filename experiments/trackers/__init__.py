"""Where a run is shown beside metrics.jsonl: Weights & Biases, TensorBoard, or whatever a config names."""
