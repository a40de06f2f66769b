"""CUDA kernels: built by NVRTC, launched through the driver, no framework."""
