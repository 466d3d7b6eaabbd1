"""This package runs models fast on a GPU: graphs, fused layers, packed matrices, and Triton kernels."""
