"""What recipes/gpu_check.py checks: one function a check, run by each of its ranks in a process of its own."""
