"""A fit from start to end: parameters, start, loop, checkpoints, several processes, the model's file."""
