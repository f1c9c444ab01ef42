"""The CUDA driver API, typed: devices, memory, kernels, launches. Importing calls nothing."""
