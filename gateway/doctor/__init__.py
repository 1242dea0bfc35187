"""The self-check behind `mlx-gateway doctor --engine`: does the engine compute rightly here.

    checkup        which models are checked, each in a process of its own
    process        what such a process says, line by line, and how it ended
    child          that process: it loads a model and tries it, and a fault of mlx may end it
    loading        a model of models.yaml → its trial
    examination    the stages of a trial: load, try, measure, close
    embedding      what an embedding model is made to do
    generation     what a chat model is made to do
    findings       what was measured → ok, warn or fail
    machine        versions and system, for a bug report
    report         a table, and JSON without paths

Only child, once it runs, and loading import mlx. golden.json is tests/golden/make_golden.py's.
"""
