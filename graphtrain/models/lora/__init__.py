"""LoRA adapters: which weights are trainable, their layers, quantized base weights."""
