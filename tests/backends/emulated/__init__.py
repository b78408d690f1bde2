"""A GPU in NumPy: what the compiler made of the Triton kernels, PTX, is run instruction by instruction."""
