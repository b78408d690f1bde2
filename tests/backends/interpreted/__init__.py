"""The Triton kernels in Triton's interpreter, on CPU tensors: the contracts of all backends, on small shapes.

``test_triton.py`` runs these files in processes of their own, since the interpreter is asked for before triton is
imported. By hand: ``TRITON_INTERPRET=1 pytest -n 0 tests/backends/interpreted/accuracy.py``. A tile is 16 x 16 there,
so that sizes of 17 and more make several; a program takes some 20 ms.

With EMULATED_ARCH=80, 90 or 100 in place of TRITON_INTERPRET=1, the same tests compile the kernels for such a GPU and
run the PTX that comes of it on the emulated one (``tests/backends/emulated``), some ten times as long.
"""
