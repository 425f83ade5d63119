"""The backend of XLA for CPU, GPU and TPU, and what it needs to know of JAX and XLA."""
