"""Our models beside transformers' (torch, on the CPU), one key of a config after another.

    python -m benchmarks.reference               try every row that has no result yet
    python -m benchmarks.reference glm qwen3     try some architectures, and print the table

A row is an architecture, a form of its files and one key of its config. A tiny checkpoint with
random weights is made by transformers' class, saved, opened by the gateway, and the logits of both
are compared: at every position of a prompt, and in steps after a prefill.

configs.py     how small each architecture is made
keys.py        which keys of a config are changed, and to which values
forms.py       files as transformers 5 saves them, and as the hub's originals are
torch_side.py  transformers' model of a row, and its logits
our_side.py    the gateway's
trial.py       one row: both sides, compared
rows.py        the rows to try, their results in a file, and how a result is judged
table.py       docs/architectures.md and docs/reference.json
"""
