"""`cocod-bench`: how fast strategies train, each as a fraction of training without communication in the same run."""
