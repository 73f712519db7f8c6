"""The sm_75 PTX of the attention kernels, run on whatever NVIDIA GPU is there.

``prepare`` records, compiles and packs where there is no GPU; ``runner`` runs the bundle where
there is one, and compares with ``reference``. Both make the calls of ``trials``.
"""
