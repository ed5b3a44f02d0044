"""What tests share. Import it as in `from support.ranks import run_ranks`: `conftest.py` puts `tests/` on the path."""
