"""Attention kernels in Triton: tensors in, tensors out. On a CPU they run in Triton's interpreter only."""
