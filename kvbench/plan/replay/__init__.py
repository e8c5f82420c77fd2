"""Cache policies as array kernels: a trace of block ids against one capacity, at the speed of a compiled loop.

A kernel is called with (keys, unique, capacity, hits): keys (n,) int32 are ids numbered densely from 0 in order of first use,
below `unique`; capacity in blocks, 1 <= capacity < unique; hits (n,) bool, all false, is set where the block was resident.
Blocks are independent objects of size 1: no references, no chains. KERNELS in kernels.py holds them by name.
"""
