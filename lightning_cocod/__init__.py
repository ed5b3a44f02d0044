"""PyTorch Lightning strategies that hide the network behind the computation."""
