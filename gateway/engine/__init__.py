"""The maths: the only floor that imports mlx, mlx_lm, outlines and tokenizers.

Plain synchronous code: no await, no lock, no log line, no metric. `blas` comes
first, because it loads a fast BLAS that must be there before mlx is.
"""

from gateway.engine import blas as blas
