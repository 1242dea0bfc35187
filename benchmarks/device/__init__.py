"""`make device`: a device's answers and their speed, on whatever device mlx has, without a hub.

`python -m benchmarks.device [--parts] [--part N] [--small] [--state FILE] [--out DIR]`.

    shapes    models of known shapes with random weights
    forcing   answers with given tokens, through the engine's own passes
    parity    rows in every way beside the rows alone
    speed     our engine and mlx-lm's BatchGenerator in turn
    cells     embeddings and reranking as mlxcel's public tables have them
    serving   servers over HTTP, embeddings, the lane
    parts     the parts that are run, numbered
    results   the findings of parts, and the file that keeps them
    machine   the machine that is measured
    page      docs/devices/<device>-<date>.md
    table     the table of all pages
"""
