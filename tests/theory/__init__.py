"""The theorems of docs/theory.md against runs, exact moments and cases that must fail.

`PYTHONPATH=tests python -m theory --out out/verify` measures and judges all of it (`make verify`).
"""
