"""The self-check behind `mlx-gateway doctor --engine`: does the engine compute rightly here?

    checkup   which models are checked, each in a process of its own
    child     that process: it loads a model and tries it, and a fault of mlx may end it
    loading   a model of models.yaml → its trial
    trials    the stages of a trial of an embedding or a chat model: load, try, measure, close
    findings  what was measured → ok, warn or fail
    report    a table, and JSON without paths, with the versions and the system

Only loading imports mlx, and child once it runs. golden.json is tests/golden/make_golden.py's.
"""
