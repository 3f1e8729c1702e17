"""DiPaCo and DiLoCo in JAX: one language model trained on many small, scattered islands of accelerators."""

__version__ = '0.1.0'
