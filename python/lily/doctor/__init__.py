"""What `lily doctor` checks: kernels against a reference, the demo model against golden data, checkpoints.

Nothing here is imported by `import lily`. `reference*.py` is the specification of every kernel, `cases*.py`
has the inputs and tolerances, `kernels.py` runs and judges them; `golden.py`, `weights.py` and `passes.py`
look at whole models. Nothing prints.
"""
